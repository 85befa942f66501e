"""Attention without a KV cache: tokens of packed sequences attend to both sides. For encoders.

`packed_attention` has the kernel with its reference. It imports `score_rules` alone of the folder above.
"""
