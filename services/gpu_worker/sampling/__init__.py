"""From logits to token ids.

- `logits_steps.LOGITS_STEPS`: the steps that change logits or limit the choice, in order, with their parameters.
- `sampler.Sampler` samples on the host: `host_steps` implement the list, `topk_topp_sampler` chooses a token,
  `metadata` holds the parameters of all slots, `logprobs` reports log-probabilities.
- `device_steps.DeviceLogitsEdits` writes the same list into the slots of steps that run ahead; kernels read it there.

To add a logits step:

1. Add its parameters to `Sampling` in `shared/messages` and an entry to `LOGITS_STEPS`, at its place in the order.
2. Host: add a class with `start`, `end`, `apply` and `on_sampled` to `HOST_STEPS`.
3. Device: add a function that writes a field of the slot to `DEVICE_STEPS`, and read the field in
   `kernels/sampling`. Without a kernel the function returns False for slots that use the step: the host samples them,
   and they wait for that in every second step or so (`execution.host_sampling`).
4. A step that needs the host between tokens returns False too. Its `apply` may stop rows: they take no token, and
   compute their position again in the next step or fail.
5. `test_logits_steps` fails until host and device have the entry and every parameter belongs to one step.

`batch` and `execution/` call this folder. It imports `slots`, `structured_output/`, the kernels and, for
prompts, `models/`.
"""
