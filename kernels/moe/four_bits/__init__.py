"""Products of experts with weights of 4 bits whose codes go from memory straight to the registers from which tensor
cores read the left operand, in Gluon; on a GPU.

- `operands`: both operands of a block of inputs; `product_steps`: what a program does with one block after another.
- `mma_form`: which weights the kernels multiply, and what they are compiled for.
- `grouped_mma`: each tile of at most 16 pairs times the weight of its expert, as `grouped_linear` computes it.
- `row_sums`: the product of few rows that also sums a row's experts, as `down_skinny` does.

As `kernels/quantized/linear_blocks_mma`, which is of linear layers, but codes lie in the order in which all kernels of
experts read them: `quantized_grouped` multiplies the same weights where tiles have more pairs.
"""
