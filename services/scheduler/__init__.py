"""One model's scheduler: admission, continuous batching, KV block accounting, and the worker groups.

`service` is the loop over the links; `core.Scheduler` is the same without sockets: `on_message`, then `step`. It makes
each part once and gives it to its users: no part is reached through another.
`outbox` collects the frames of a step; `plan_pacer` decides when the next plan of a worker is sent.

The folders, lowest first. Each imports only itself, `outbox`, `plan_pacer`, and folders before it:

- `sequences`: requests, sequences, beam hypotheses.  `kv_cache`: blocks and the prefix cache.
- `adapters`: LoRA adapters: which are served, and where they are.
- `batch`: what runs in each worker group.  `queue`: what waits, in which order, and how long.
- `lifecycle`: how sequences start to wait, wait again and end.  `admission`: the answers to new requests.
- `workers`: attachment, routing, pause, sleep, quarantine.  `planning`: the plan of each step, and its result.

`simulator` is the scheduler with simulated workers and clients.
"""
