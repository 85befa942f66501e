"""Kernels that begin while the one before them ends: programmatic dependent launch, from compute capability 9.0 on.

A kernel launched so says `gdc_launch_dependents` at once, so that the next one may be set up and fetch what no kernel
writes (weights), and `gdc_wait` before it reads or writes anything else. It must wait in all its programs: the next
kernel takes its end for the end of everything before it.
"""

import functools

import torch


def supports_pdl(device: torch.device) -> bool:
    return device.type == "cuda" and _capability(device.index or 0) >= (9, 0)


def pdl_options(pdl: bool) -> dict[str, bool]:
    """For the launch of a kernel, beside its own argument."""
    return {"launch_pdl": True} if pdl else {}


@functools.cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)
