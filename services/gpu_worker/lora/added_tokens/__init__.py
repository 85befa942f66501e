"""Tokens that a LoRA adapter adds to the vocabulary: ids from the model's `vocab_size` up, for its requests alone.

- `added_rows.cut_added` takes their rows out of an adapter's modules, which then have the model's shapes.
- `tokenizer_check` reads the tokenizer in the adapter's folder: the added tokens' texts, and whether it may be used.

Their embeddings are rows of `token_rows.ReplacedRows` with ids behind the model's, their logits columns behind the
model's, which are -inf in rows of other adapters (`cpu_token_products.CpuAddedColumns`). How many ids a sequence may
name is `slots.Slot.vocab_size`; masks of grammars have the model's vocabulary, and ban all of them.

Imports `lora.module_tensors`. `lora.token_rows` and the reader process call it.
"""
