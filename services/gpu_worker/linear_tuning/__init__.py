"""Autotunes a model on a GPU: measures the fastest kernel config of its linear layers for each shape and batch size.

- `tuner.Tuner` owns the kernel configs of one model. It times the candidates, installs the fastest in each `Linear` and
  writes them to a cache file for later starts.
- `expert_tuner.ExpertTuner` does the same for the products of a mixture's experts; `Tuner` calls it and keeps its
  configs in the same file.
- `idle_tuning.IdleTuning` runs the tuner a few milliseconds at a time while the worker has no step to run.
- `kernel_configs` lists the candidates, compares timings, and reads and writes the cache file.
- `timing.LinearTimer` times GEMMs in CUDA graphs. `products.Products` makes the callable of a kernel config: the
  product of the layer's method (cuBLAS), the skinny GEMM for few rows (`linear_skinny`) or the stream-K GEMM
  (`linear_stream_k`). It has a class with the kernels of each form of weights; tuner and timer read no weight.

Types to know: `KernelConfig` describes how one GEMM is computed, `LinearShape` the layers of one shape, and
`TunedConfig` holds the measured kernel configs of a model for one number of rows.

`startup.cuda` creates the `Tuner`, `compilation.record_kernels` compiles its candidates, `execution.cuda` calls
`IdleTuning.step` when idle, and `bench.linear`, `bench.linear_8_bits` and `bench.linear_weight_only` print timings.
Imports go from `tuner` to `timing`, `products` and `kernel_configs`, and from there to `layers.linear` and `kernels/`.
`idle_tuning` and `kernel_configs` import neither torch nor Triton.
"""
