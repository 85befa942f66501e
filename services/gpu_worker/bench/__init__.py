"""The kernel table of `blockyard bench kernels`: timings of the GPU kernels, compared with the limits of the GPU.

`python -m blockyard.services.gpu_worker.bench` runs `__main__`, which calls `measure() -> list[Row]` of each family of
kernels (`adapters`, `attention`, `experts`, `latent`, `linear`, `linear_8_bits`, `linear_weight_only`,
`quantized_experts`, `sampling`, `small`) and prints one Markdown table. The worker does not import this folder. It
imports `kernels/`, `layers/`, `linear_tuning/` and `quantization/`.

- `row.Row`: one line of the table. `row.row` computes it from seconds, bytes and operations.
- `row.Ceilings`: memory bandwidth, bf16 and fp8 GEMM rates and launch time of this GPU, measured once for each process.
- `timing.graph_seconds`: times calls in a CUDA graph. `timing.copies`: how many inputs exceed the L2 cache.

- `rank_sums`: a program of its own for `blockyard bench parallel`, which times sums over ranks.

How to add a family: write a module here with `measure() -> list[Row]`, and add it to `__main__.FAMILIES` and
`__main__.MEASURES`.
"""
