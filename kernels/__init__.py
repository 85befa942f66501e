"""Triton kernels of prefill and decode steps, each beside its host function and a reference in plain torch.

- `attention/`: attention over the paged KV cache: decode, prefill, Hopper, batch-invariant, and the CPU path.
- `kv_cache/`: the cache's layout, dtypes and metadata; rotary embedding with the KV write; copies of whole blocks.
- `layers/`: linear layers, RMSNorm, LayerNorm, the gated activation, rotary embedding.
- `quantized/`: linear layers with quantized weights; what unpacks codes, for experts too.
- `moe/`: routing and grouped products of mixtures of experts.
- `sampling/`: penalties, sampling with Gumbel noise from Philox, log-probabilities.
- `lora/`: products of adapters, each row with its own.
- `all_reduce/`: sums over the ranks of a host, through memory that all of them write to.
- `slots/`: state of batch slots on the device, and the kernels that begin and end a decode step.

`services/gpu_worker` calls them, and `services/kv_transfer` copies blocks. This package imports no service. Within it
`attention/` imports `kv_cache/`, which imports `layers/`, as do `moe/` and `quantized/`; `moe/` imports `quantized/`;
no other folder imports another. `int_math`, `gpu_facts`, `programmatic_launch` and `tensor_checks` serve all host
functions. PERFORMANCE.md has the figures. Modules without Triton (references of `sampling/` and `slots/`, RMSNorm, the
CPU path) are imported on machines that have none.

To add a kernel:
1. A file in the folder of its subject: the `@triton.jit` kernel, a host function that checks shapes and launches it,
   and `<name>_reference` in plain torch. Shapes and dtypes go into the host function's docstring.
2. A test in `tests/kernels/<folder>/` against the reference; without a GPU it runs in Triton's interpreter.
3. A caller in `services/gpu_worker`. `compilation/record_kernels.py` must launch it, so that a start compiles it.
4. A row in `services/gpu_worker/bench`, which `blockyard bench kernels` prints, and its figure in PERFORMANCE.md.
5. Nothing else: mypy and ruff know the kernels' files by their folder.
"""
