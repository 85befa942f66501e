"""How a checkpoint stores matrices, and how they are kept and multiplied.

- `method`: `LinearMethod` and `ExpertMethod`, a weight as it is kept; `Format`, how a checkpoint stores weights.
- `dense`: weights that are kept in the dtype of the model, which no file quantizes.
- `formats/`: what each `quant_method` means, a `scheme.Scheme`, by the names of matrices (`names`).
- `kept/`: the forms of quantized weights in memory, a `kept.form.KeptForm` each.
- `quantized_format` makes linear layers and experts of both, by the rules that hold for all formats; where parts of a
  product differ it makes a `quantized_format.CutLinear`.
- `registry.find_format` picks the format of config.json by its line in `shared/quantization/table.py`.

A format is added as the docstring of `formats/` says, a kept form as that of `kept/`. Layers ask for weights by
`layers.linear.LinearLayers`. Imports go to `loading/` alone.
"""
