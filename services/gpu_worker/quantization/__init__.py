"""The storage formats of weights: how a checkpoint has a matrix, and how it is kept and multiplied.

- `method`: `LinearMethod` and `ExpertMethod`, a weight as it is kept; `Format`, how config.json says that it is stored.
- `dense`: weights that are kept in the dtype of the model. `mxfp4`: gpt-oss's experts, which become those at load.
- `registry.find_format` picks the format of config.json; `shared/quantization.py` has the names.

Layers ask for weights by `layers.linear.LinearLayers`. Imports go to `loading/` alone.
"""
