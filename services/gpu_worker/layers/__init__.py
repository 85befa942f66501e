"""Parts that model families are built of: linear layers, rotary embeddings, and the operations between them."""
