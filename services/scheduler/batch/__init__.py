"""The running batch of each worker group: its sequences, slots, KV cache and plans in flight.

- `worker_groups`: `WorkerGroup` owns all that runs on one worker; its methods alone change it. `WorkerGroups` owns the
  attached groups, and knows for which of them a plan may be possible.
- `decode_batch`: the sequences that decode in step, so that a step costs the same however many there are.
- `pipeline_turns`: with pipeline stages there are several decode batches, which run in turn.
- `plan_builder`: a plan while it is built, and its record until the result.

Where a drafter goes, of which there is none yet:
1. Its tokens are proposed in the worker, beside `execution.device_loop`, and verified as a prompt's chunk is computed.
2. A decode is planned as one token in `decode_batch`: it becomes 1 + m, with blocks for all of them.
3. A result has 0 to m tokens already (`SlotResult.token_ids`), and `planning.result_applier` applies any number.
4. Tokens that were not taken leave their KV behind, which the next step of the sequence writes over.

Read by all folders that follow, changed by `lifecycle` and `planning`. Imports `sequences` and `kv_cache`.
"""
