"""The worker: holds the weights and the KV cache of one model replica and runs its steps, on a GPU or on the CPU.

How a plan is executed:

1. `service.Worker` polls its links. `session.SchedulerSession` checks that a `StepPlan` comes from the attached
   scheduler and is in order, and queues it.
2. `runner.Runner.launch` applies the plan to `batch.Batch`: it ends and starts slots, extends block tables, and copies,
   fetches and saves KV blocks (`kv/`).
3. The step runs: forward pass, sampling, results. `execution.device_loop.DeviceLoop` launches steps and collects them
   in order. `execution.cuda` launches one as CUDA graphs ahead of the host, `execution.cpu_steps` computes it before
   its launch returns. Rows of slots that only the host can sample wait for their tokens.
4. `Runner.collect` returns the completed plans, and `service.Worker` answers each with a `StepResult`.

Folders:

- `models/`: model families. `layers/`, `attention/`: the parts they are built from.
- `sampling/`: from logits to tokens.
- `structured_output/`: masks of structured output, made by matcher processes beside the worker.
- `pooling/`: from hidden states to vectors, scores and classes. `encoders/`: runs models without KV.
- `execution/`: steps on a GPU and on the CPU, CUDA graphs, the device loop.
- `startup/`: what differs by device when a worker starts, one `Backend` for each kind of device.
- `compilation/`: compiles Triton kernels in parallel at startup.
- `parallel/`: shares of several ranks, and their collectives. `ranks/`: the processes of other ranks.
- `kv/`: KV memory, block hashes, and KV blocks in host memory.
- `transfers/`: KV blocks that go to other workers or come from them.
- `loading/`: weights, CPU offload, sleep.
- `quantization/`: how weights are kept, and the formats of checkpoints.
- `linear_tuning/`: picks the kernels of each linear layer and of experts.
- `mock/`: a worker without a model. `bench/`: timings of kernels. `quantize/`: writes quantized checkpoints.

`engine.start` builds the runner on a backend, which is chosen once. What copies between device and host memory asks the
`host_link.HostLink` of the device: no other code needs to know which device it is, except for kernels.

Imports go one way: `engine` -> `encoders/` -> `startup/` -> `compilation/` -> `runner` -> `execution/` -> `batch` ->
`pooling/`, `sampling/`, `structured_output/`, `attention/`, `linear_tuning/` -> `kv/` -> `models/` -> `layers/` ->
`quantization/` -> `loading/`. tests/test_imports.py holds the whole order.
`service`, `session`, `interfaces`, `loading.sleep` and `mock/` do not import torch, so a mock worker without transfers
runs without it.
"""
