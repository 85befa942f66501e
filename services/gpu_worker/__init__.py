"""Weights, KV memory, the forward pass and sampling, on cuda or cpu."""
