"""The paged KV cache on the device: dtypes, the metadata kernels are given, writes, and copies of whole blocks."""
