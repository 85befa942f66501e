"""Triton kernels of a decode or prefill step, each beside its host function and a reference in plain torch."""
