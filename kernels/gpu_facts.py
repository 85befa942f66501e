"""Facts of a GPU that choose kernels and their numbers of programs, each looked up once."""

import functools

import torch


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """1 for another device than a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@functools.cache
def compute_capability(device: torch.device) -> tuple[int, int]:
    """Returns the compute capability of a GPU."""
    return torch.cuda.get_device_capability(device)
