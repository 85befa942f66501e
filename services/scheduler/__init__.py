"""Admission, continuous batching and KV block accounting."""
