"""Kernels against the hardware's ceilings, one file a kind; each has `measure() -> list[Row]`. Run on a GPU."""
