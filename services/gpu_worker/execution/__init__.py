"""Computes the steps of a batch: eagerly, as CUDA graphs, and ahead of the host.

- `eager.HostSteps`: a step that the host prepares and samples. On the CPU every step is one.
- `device_loop.DeviceLoop`: launches steps on a GPU ahead of the host and collects their results in order.
- `device_slots.DeviceSlots`: tracks the state of the slots on the GPU, and writes what plans change through the buffers
  of `pinned_ring`.
- `device_masks` lets the device read the masks of structured output.
- `host_sampling.HostSampling`: samples on the host for slots that wait for that on the device.
- `prompt_logprobs.DevicePromptLogprobs` computes log-probabilities of prompts behind such a step.
- `decode_graphs.DecodeSteps`: steps of one token a sequence, as CUDA graphs.
- `prefill_steps` builds steps with prefills, `prefill_graphs` captures them, and `prefill_sizes` decides which sizes.
- `stored_layers` tells which layers of a step with prefill have stored K and V, for the sends of KV blocks.
- `prefill_kernels` compiles prefill attention before the first step.

`runner`, `startup/` and `compilation/` call this folder. It imports `batch`, `sampling/`, `kv/`, `attention/`,
`linear_tuning/`, `structured_output/`, `models/` and the kernels.
"""
