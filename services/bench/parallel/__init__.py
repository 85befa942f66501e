"""`blockyard bench parallel`: one GPU, and layouts of several, measured one after another and compared.

- `layouts`: tp2, pp2, ep2 and their products, as flags of `blockyard serve`.
- `measures`: the figures of a running server.
- `items`: their names, and which layouts and servers they are of.
- `tables`: the items of each model and layout, of two and of four GPUs.
- `rank_sums`: sums over ranks, by the worker's own benchmark, and the rate at which a GPU reads its memory.
- `rows`: figures with their ratios, floors and bars. Pure.
- `run`: starts the servers, yields each row once it is measured, and goes on after one that fails.
- `command`: flags and output.

Imports: `suite.served` and `suite.shapes` for servers and models, `prefill_decode.measures` and `.deployments` for
prefill and decode workers, and modules of `bench` outside of these two.
"""
