"""The parts of a transformer model: linear layers, norms, MLPs, attention, rotary and token embeddings.

`models/` builds models from these parts. Each part declares its weights in a `WeightTable`, which maps tensor names of
the checkpoint to memory.

- `Linear`: one matrix product. It calls a kernel that `linear_tuning/` installed, or its `LinearMethod`.
- `LinearMethod`: the storage format of a weight, quantized or not.
- `Attention`, `GatedMLP`, `MLP`: the sublayers of a transformer layer. `AttentionOptions` says how checkpoints store
  q, k and v, what normalises q and k, and which numbers of a head are rotated.
- `latent/`: latent attention, which keeps one row a token for all heads.
- `moe/`: mixtures of experts.
- `decoder_layers`: sublayers around the residual: norms before (`PreNormLayer`), after or both (`PostNormLayer`), or
  side by side (`ParallelLayer`). A layer keeps the fused kernels that its norms allow. It has two parts, up to its
  attention and behind it, because `models.decoder.Decoder` drops rows between them in the last layer.
- `rope_parameters` reads the rotation from config.json, `rotary` computes its tables, one for each kind of layer.
- `FusedOps`: the operations between matrix products, one implementation for each device type. Layers that need them ask
  `find_ops` for them when they are made.
- `cpu_offload.HostWeights`: matrices that stay in host memory and are copied to the GPU in every step
  (`--cpu-offload-gb`). `engine` calls it.

Layers import `loading/`, `step` and `kernels/`.

How to add a quantization format:
1. Write a class with the methods of `LinearMethod` (linear_method.py) in a file of its own.
2. In `create`, declare the weights: `table.place(name, target, shape, stored=...)`; `stored` is the checkpoint's dtype.
3. In `prepare`, repack the loaded weights; in `apply`, multiply.
4. `dense_weight` returns None unless the kernels of `linear_tuning/` can read the weight. `tensors` and `replace` let
   --cpu-offload-gb keep the tensors in host memory.
   Experts of a mixture are stored likewise: a class with the methods of `ExpertMethod` (moe/expert_weights.py).
5. Add an entry to `LINEAR_METHODS`: `quant_method` of config.json, and a function that returns `create` for a layer.
"""
