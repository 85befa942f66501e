"""How a step is computed: eagerly, as CUDA graphs, and ahead of the host.

- `eager.HostSteps`: a step that the host prepares and samples. Every step on CPU is one.
- `device_loop.DeviceLoop`: launches steps on a GPU ahead of the host and collects their results in order. The state of
  its slots is on the GPU: `device_slots` writes what plans change, through the buffers of `pinned_ring`.
- `decode_graphs.DecodeSteps`: steps of one token a sequence, as CUDA graphs. `prefill_steps` builds steps with prefill,
  `prefill_graphs` captures them, `prefill_sizes` decides which sizes.
- `warm_up` runs the first steps.

`runner` and `engine` call this folder. It imports `sampling/`, `kv/`, `attention/`, `models/` and the kernels.
"""
