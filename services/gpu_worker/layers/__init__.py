"""Parts that model families are built of: linear layers, norms, MLPs, attention, rotary and token embeddings.

`models/` builds these parts with a `WeightTable`, which records where each weight of the checkpoint goes. Parts import
`loading.weights`, `step` and `kernels`; they import neither `models/` nor `execution/`.

- `Linear`: one matrix product. It calls a kernel that `linear_tuning/` picked, or its `LinearMethod`.
- `Attention`, `GatedMLP`, `MLP`: the sublayers of a transformer layer.
- `FusedOps`: the operations between matrix products, chosen for the device.

How to add a quantization format:
1. Write a class with the methods of `LinearMethod` (linear_method.py) in a file of its own.
2. Its `create` makes the weight places: `table.place(name, target, shape, stored=...)` declares the stored dtype.
3. `prepare` repacks what was loaded; `apply` multiplies.
4. `dense_weight` returns None unless the kernels of `linear_tuning/` can read the weight; `tensors` and `replace` let
   --cpu-offload-gb keep the tensors in host memory.
5. Add a line to `LINEAR_METHODS`: the `quant_method` of config.json, and a function that picks a class for a layer.
"""
