"""The running batch of each worker group: its sequences, slots, KV cache and plans in flight.

- `worker_groups`: `WorkerGroup` owns all that runs on one worker; its methods alone change it. `WorkerGroups` owns the
  attached groups, and knows for which of them a plan may be possible.
- `decode_batch`: the sequences that decode in step, so that a step costs the same however many there are.
- `pipeline_turns`: with pipeline stages there are several decode batches, which run in turn.
- `plan_builder`: a plan while it is built, and its record until the result.

Read by all folders that follow, changed by `lifecycle` and `planning`. Imports `sequences` and `kv_cache`.
"""
