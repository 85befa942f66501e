"""What differs by device when a worker starts: one `Backend` for each kind of device, chosen once.

- `backend.Backend`: what `engine` asks of a device. `backend.pick_backend` makes the one of `--device`.
- `cpu.CpuBackend`, `cuda.CudaBackend`: the devices. `cuda` imports Triton, so a worker on the CPU does not import it.
- `model_tables`: the tables that a rank's model is built on.
- `rank_connection.connect_ranks`, `stage_choice`: of a worker with several ranks.
- `start_report.StartReport`: the phases and notes of a start.

A backend has the memory figures, the choice of kernels, the memory plan, the store of KV blocks in host memory, and the
first steps, with CUDA graphs or without. Its `link` (`host_link.HostLink`, of a GPU `cuda_link.CudaLink`) has the
streams, events and pinned memory of the device; the worker's `WeightTable` has it, for what loads, offloads, counts,
samples on the host and runs steps.

`engine` and that of encoders call this folder. It imports `compilation/`, `runner`, `warm_up`, `memory_profile` and
what these import.

How to add a device: one file with a class that has the methods of `Backend`, and a `HostLink` if its memory is not host
memory; a line in `pick_backend`; the operations of its layers in `layers.fused_ops.OPS`, and its attention kernels in
`attention.choice.TABLE`. KV blocks on it need an `Arena` (`kv_transfer.arena.make_arena`).
"""
