"""Logits to tokens on the device: penalties, sampling with Gumbel noise from Philox, log-probabilities."""
