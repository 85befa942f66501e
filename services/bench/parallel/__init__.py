"""`blockyard bench parallel`: one GPU, and layouts of several, measured one after another and compared.

- `layouts`: tp2, pp2, ep2 and their products, as flags of `blockyard serve`.
- `measures`: the figures of a running server. `busy`: how long its GPUs had no kernel meanwhile.
- `rank_sums`: sums over ranks, by the worker's own benchmark, and the rate at which a GPU reads its memory.
- `rows`: figures with their ratios, floors and bars. Pure.
- `command`: starts the servers, prints each row once it is measured, and goes on after one that fails.

Imports: `suite.served` and `suite.shapes` for servers and models, and modules of `bench` outside of `prefill_decode`.
"""
