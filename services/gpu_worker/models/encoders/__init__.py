"""Encoders: models whose tokens attend to both sides. They run without a KV cache, over packed sequences.

- `encoder.Encoder`: embeddings of words, positions and token types, and layers with a norm behind each sublayer.
- `bert`, `roberta` (XLM-RoBERTa, too): built from it.
- `modernbert`: a `decoder.Decoder` whose attention is of both sides, with windows and two rotations.

EmbeddingGemma is `gemma.gemma3` with `use_bidirectional_attention`. `models.output_layers` has what classifiers share.
"""
