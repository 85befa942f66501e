"""Attention over the paged KV cache: one interface, one file a backend, one table that chooses.

`step.Attend` is the interface. An object is built once a step: it holds the step's metadata. Each layer calls it with
q, k and v; it normalises and rotates q and k, stores K and V in the cache, and returns the attention of the rows.

- `choice`: the table of kernels. It imports neither torch kernels nor Triton, so every device can read it.
- `cpu_metadata.CpuMetadataBuilder` builds `CpuAttention` or `BatchInvariantCpuAttention`.
- `triton_attention.build_attention` builds the attention of a step on a GPU. It is imported on a GPU alone.

`execution/` builds the objects; `models/` call them through `Step.attend`. Imports go from here to `kv/`,
`models.interface` and `kernels/`.

How to add an attention kernel:
1. Write it in `kernels/attention/`, with its torch reference.
2. Add a name to `choice.AttentionKernel` and an entry to `choice.TABLE`, before the entries it takes cases from.
3. On a GPU, write a `TritonKernel` (triton_attention.py): `schedule` builds metadata once a step and layer kind,
   `attend` runs the kernel. Add it to `KERNELS`.
4. On a CPU, or if it also stores K and V, write a class with the signature of `step.Attend`.
5. Test it in tests/services/gpu_worker/attention/, and its choice in test_choice.py.
"""
