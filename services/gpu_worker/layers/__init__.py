"""The parts of a transformer model: linear layers, norms, MLPs, attention, rotary and token embeddings.

`models/` builds models from these parts. Each part declares its weights in a `WeightTable`, which maps tensor names of
the checkpoint to memory.

- `Linear`: one matrix product. It calls a kernel that `linear_tuning/` installed, or its `LinearMethod`, which keeps
  the weight (`quantization/`). `LinearLayers` makes what multiplies, in the format of config.json.
- `Attention`, `GatedMLP`, `MLP`: the sublayers of a transformer layer. `AttentionOptions` says how checkpoints store
  q, k and v, what normalises q and k, and which numbers of a head are rotated.
- `latent/`: latent attention, which keeps one row a token for all heads.
- `moe/`: mixtures of experts.
- `decoder_layers`: sublayers around the residual: norms before (`PreNormLayer`), after or both (`PostNormLayer`), or
  side by side (`ParallelLayer`). A layer keeps the fused kernels that its norms allow. It has two parts, up to its
  attention and behind it, because `models.decoder.Decoder` drops rows between them in the last layer.
- `rope_parameters` reads the rotation from config.json, `rotary` computes its tables, one for each kind of layer.
- `FusedOps`: the operations between matrix products, one implementation for each kind of device. Layers that need them
  ask `find_ops` for them when they are made.
- `cpu_offload.HostWeights`: matrices that stay in host memory and are copied to the GPU in every step
  (`--cpu-offload-gb`). `engine` calls it.

Layers import `quantization/`, `loading/`, `step` and `kernels/`.

A quantization format is one file in `quantization/formats/`, one line in shared/quantization/table.py and one test: the
docstring of `quantization/formats/` says what each has. A form of quantized weights is added as that of
`quantization/kept/` says.

Where a rank's share goes: `LinearSpec.split` and the units of its parts say how a matrix is divided, and `WeightTable`
takes the share of its `Shard` (parallel/shares.py). A product with `Linear.is_partial` is still to be summed: layers
hand it on as `delta`, and `FusedOps` of a table with `ranks` sum it before they do anything else with it.

- `adapter_rows.AdapterRows`: which adapter each row of a step has. `long_rotations`: the rotations of those for longer
  contexts.

Where an adapter's rows go: `Linear.spec` has the names of the parts and their rows, and `Linear.adapt` adds to each
product in steps with adapters (`lora/`). Other steps run the kernels that they run without. `Linear.join` puts the
columns of several ranks together behind that. `Linear.wrap` changes each product of all steps, also of kernels that are
installed later; a wrapped layer has no fused kernels.
"""
