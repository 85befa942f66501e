"""Kernels of mixtures of experts: a router picks a few experts for each row, and the row's output is their sum.

- `router_linear`: rows times a router in float32, to its logits.
- `route_experts`: router logits to the chosen experts and their weights.
- `map_experts`: the chosen pairs of row and expert, sorted by expert and padded to tiles.
- `grouped_linear`: each tile times the weight of its expert, with the gate of the MLP or the routing weight.
- `grouped_linear_prefill`: the same for many pairs, with tensor descriptors (TMA).
- `combine_experts`: the sum of each row's experts, in fixed order.
- `few_rows`: up to 16 rows need no map, because each program of `grouped_linear` finds the pairs of its expert.
- `experts_skinny`: one or a few rows need neither map nor sum: two products without tensor cores.
- `quantized_skinny`, `quantized_grouped`: `experts_skinny` and `grouped_linear` of quantized weights, unpacked in
  registers. `round_rows`: inputs rounded to 8 bits for them.
- `four_bits`: the same of tiles of few pairs with weights of 4 bits, whose codes never leave registers.

Sizes follow from the number of rows alone and nothing is read back by the host, so all of it runs in CUDA graphs. No
atomics: the result of a row is the same in every run. Kernels begin while the one before them ends: see
`programmatic_launch`. Of other folders RMSNorm and
`quantized` are imported.
"""
