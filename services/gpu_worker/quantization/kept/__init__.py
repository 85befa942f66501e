"""The forms in which quantized weights are kept in memory, and how each is multiplied.

A form is one file with one frozen dataclass that has the methods of `form.KeptForm`; `form.KeptLinear` and
`form.KeptExperts` make a `LinearMethod` and an `ExpertMethod` of it. How to add one:

1. Its fields are what parts of one product share (bits, group, whether there are zeros): forms that are equal fuse.
2. `tensors` names the tensors of a matrix [outputs, inputs]: dtype, and how many inputs an element stands for.
3. `dequantize` is the reference: [..., outputs, inputs] of the tensors. `fill` writes dummy weights that stand for
   numbers with a standard deviation of 0.02.
4. `round_inputs` rounds what it multiplies, where inputs are quantized, too: each row by itself.
5. `product` is a faster product than that of dequantized weights, or None. For tuned kernels of a GPU, add a class by
   the form's name to `FORMS` in linear_tuning/products.py.
6. The CPU dequantizes weights once, unless the form has the methods of `form.HostForm`, too.
7. Columns may be in an order of their own (`act_order`). The matrix's name is then in the form, so that nothing fuses.
"""
