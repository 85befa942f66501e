"""The worker: holds the weights and the KV cache of one model replica and runs its steps, on a GPU or on the CPU.

How one plan goes through:

1. `service.Worker` polls its links. `session.SchedulerSession` checks that a `StepPlan` comes from the attached
   scheduler and in order, and queues it.
2. `runner.Runner.launch` applies it to `batch.Batch`: slots end and start, block tables grow, KV blocks are copied,
   fetched and saved (`kv/`).
3. The step runs: forward pass, sampling, results. On a GPU `execution.device_loop.DeviceLoop` launches it as CUDA
   graphs ahead of the host. On CPU, and for requests that only the host can sample, `execution.eager` runs it
   synchronously.
4. `Runner.collect` returns the plans that are done, and `service.Worker` answers each with a `StepResult`.

Folders: `models/` one file a model family; `layers/` and `attention/` what they are made of; `sampling/` from logits
to tokens; `execution/` eager steps, CUDA graphs, the device loop; `compilation/` Triton kernels compiled in parallel
at a start; `kv/` KV memory and its contents; `loading/` weights, CPU offload, sleep; `linear_tuning/` which kernel
multiplies which matrix; `mock/` a worker without a model; `bench/` timings of kernels; `demo_model/` its training.

Imports go from the top level (`engine` builds everything, `runner` runs it) to the folders, and from `execution/` to
`sampling/`, `kv/`, `attention/` and `models/`. `service`, `session`, `interfaces`, `loading.sleep` and `mock/` import
no torch: a mock worker runs without it.
"""
