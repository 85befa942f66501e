"""Products of LoRA adapters: rows of a step, each with its own adapter or none.

- `adapter_table`: where the matrices of a layer's adapters are, and the reference of both kernels. Without Triton.
- `adapter_tiles`: the rows of a step in tiles of one adapter each.
- `add_adapters`: `shrink` multiplies rows by A, `expand` adds the product with B to the layer's output. The first is
  launched before the layer's own product, or runs beside it. `expand_few`: `expand` to few outputs. `one_row`: both of
  up to four rows, one by one.
- `add_to_heads`: the same for the up-projections of latent attention where they are absorbed.
- `adapter_tokens`: where adapters have rows of the embedding and of the head of their own, and the references of
  `adapt_embeddings` and `replace_logits`, which read them. Without Triton.

One launch covers ranks that differ, and the parts of a joint product; of a layer of experts, all pairs of a row and an
expert. Beside a product that is fused with a norm or a gate, rows are normalised or gated as `shrink` reads them. The
worker's `lora/` calls these. Of other folders they use RMSNorm, and the order of `moe.map_experts`.
"""
