"""Computes the steps of a batch, on a GPU and on the CPU.

- `device_loop.DeviceLoop`: launches steps and collects their results in order. `DeviceSteps` is what a device does.
- `cuda/`: steps on a GPU, launched ahead of the host.
- `cpu_steps.CpuSteps` computes a step before its launch returns. The host's table of slots is the state that it reads,
  so no state on a device has to be gathered and advanced beside it.
- `pipelined_steps.PipelinedCpuSteps`: with pipeline stages on CPUs, the earlier ones compute a step while the last one
  computes another.
- `pooled_steps.PooledSteps` computes steps of decoders with pooled hidden states: no row is sampled.
- `replica_steps.ReplicaSteps`: a step is launched once all replicas that have the experts together know its size.
- `packed_graphs.PackedGraphs`: CUDA graphs of steps that pool, of models with and without KV.
- `text_threads.TextThreads` divides the texts of such a step among threads of the CPU.
- `device_slots.DeviceSlots`: tracks the state of the slots on the device. `device_writes` collects what plans change,
  `pinned_ring` has the buffers that it passes through on a GPU.
- `host_sampling.HostSampling`: samples on the host for slots that wait for that.
- `prompt_logprobs.DevicePromptLogprobs` computes log-probabilities of prompts behind a step.
- `decode_tokens`: results of decodes as arrays.

`runner`, `startup/` and `compilation/` call this folder. It imports `batch`, `sampling/`, `kv/`, `attention/`,
`linear_tuning/`, `structured_output/`, `models/` and the kernels.
"""
