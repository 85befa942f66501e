"""Attention over the paged KV cache: one interface, one file for each backend, and a table that picks kernels.

The interface is `step.Attend`. `execution/` builds one object for each step, which holds the attention metadata of the
step. Each layer calls it with q, k and v. It normalises and rotates q and k, stores K and V in the cache, and returns
the attention output. Latent layers have a call of their own, `Attend.latent`, with `step.LatentRows` in place of k and
v. `Attend.of_rows` is the attention of a layer of which only some rows are needed: `Decoder` asks for it in the last.

- `choice`: the table of kernels: nothing else chooses one. It does not import Triton, so the CPU uses it too.
- `cpu_metadata.CpuMetadataBuilder`: builds `CpuAttention` or `BatchInvariantCpuAttention`.
- `absorbed`: latent layers on the CPU, whose up-projections move to the query and behind the attention.
- `metadata.AttentionMetadata`: the rows of a step on a GPU.
- `packed_attention.PackedAttention`: that of encoders, which have no cache.
- `triton_attention.build_attention`: builds the attention of a step on a GPU, `triton_latent` that of latent layers.
  Imported only on a GPU.

`execution/` and `memory_profile` call this folder. It imports `kv/`, `step`, `layers.attention` and `kernels/`.

How to add an attention kernel:
1. Write it in `kernels/attention/`, with its torch reference.
2. Add a name to `choice.AttentionKernel` and an entry to `choice.TABLE`. The first entry that fits is used.
3. On a GPU, write a `TritonKernel` (triton_attention.py) and add it to `KERNELS`: `attend` runs the kernel with the
   `ScoreRules` of the layer, and `schedule`, if the kernel needs it, builds metadata once for each step and kind of
   layer. A decode kernel of latent layers goes to `LATENT_DECODES` (triton_latent.py).
4. On a CPU, or if it also stores K and V, write a class with the signature of `step.Attend`.
5. Test it in tests/services/gpu_worker/attention/, and its choice in test_choice.py.
"""
