"""From logits to token ids.

- `logits_steps.LOGITS_STEPS`: the steps that change logits or limit the choice, in order, with their parameters. Each
  writes fields of a slot when the slot starts; sampling on every device reads them there.
- `logits_edits.DeviceLogitsEdits`: the rows of slots with changed logits, and their lists of tokens.
- `cpu_sampler` samples the rows of a step on the CPU; on a GPU `kernels/sampling` does. `topk_topp_sampler` chooses a
  token, `logprobs` reports log-probabilities.
- `host_rows` samples rows that only the host can, from either device; `user_processors` runs the functions of users.

To add a logits step:

1. Add its parameters to `Sampling` in `shared/messages`, and an entry to `LOGITS_STEPS`, at its place in the order,
   with a function that writes fields of the slot.
2. Read the fields in `kernels/sampling` and in `cpu_sampler`. Without that the function returns False for slots that
   use the step, and `host_rows` applies it: on a GPU these slots wait for that in every second step or so
   (`execution.host_sampling`).
3. A step that needs the host between tokens returns False too. It may stop rows in `host_rows`: they take no token, and
   compute their position again in the next step or fail.
4. `test_logits_steps` fails until every parameter belongs to one step. `test_cpu_sampler` compares both devices and the
   host with a plain loop over one row.

`execution/` calls this folder, and `batch` checks parameters here. It imports `slots`, `structured_output/` and the
kernels.
"""
