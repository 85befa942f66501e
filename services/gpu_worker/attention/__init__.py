"""Attention of one step over the paged KV cache: metadata built once a step, one file a backend."""
