"""Weights: from a checkpoint to the device, to host memory and back.

- `weights.WeightTable`: the places of a model's weights, filled by name; `checkpoint` reads a checkpoint into it,
  `parallel_load` with several threads, and `checkpoint_check` compares names and shapes before memory is taken.
- `cpu_offload.HostWeights`: matrices that stay in host memory and are copied up in every step (`--cpu-offload-gb`).
- `sleep.SleepingRunner`: a worker that gives its memory back; `weight_offload` moves weights to host memory for it.

`engine` and `__main__` call this folder. It imports nothing of the worker but the table of linear layers.
"""
