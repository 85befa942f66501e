"""The commands of the offline engine: `blockyard tune` runs a ring without requests, and `blockyard quantize` writes a
checkpoint and scores a text with `LLM`."""
