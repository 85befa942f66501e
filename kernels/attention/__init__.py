"""Attention over the paged KV cache: decode, prefill, a kernel for Hopper GPUs, and batch-invariant attention."""
