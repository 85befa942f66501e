"""One model's scheduler: admission, continuous batching, KV block accounting, and the worker groups.

`service` is the loop over the links; `core.Scheduler` is the same without sockets: `on_message`, then `step`.
`lifecycle` owns the live requests; `outbox` collects the frames of a step.

- `queue`: the waiting queue, its policies and bounds, and the answers to new requests.
- `batch`: the plan of each step, and its result.  `sequences`: requests, sequences, beams, text streams.
- `kv_cache`: blocks and the prefix cache.  `workers`: worker groups, routing, sleep, quarantine.
- `simulator`: the scheduler with simulated workers and clients.
"""
