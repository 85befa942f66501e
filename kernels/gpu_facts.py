"""Facts of a GPU that choose kernels and their numbers of programs. Those that stay are looked up once."""

import functools

import torch
from triton.experimental.gluon import language as gl

# Gluon is experimental: Triton 3.9 has neither name any more, and the kernels in it were measured with 3.6.
_GLUON_HAS_NAMES = hasattr(gl, "thread_barrier") and hasattr(gl.shared_memory_descriptor, "_reinterpret")


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """1 for another device than a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@functools.cache
def compute_capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def runs_hopper_kernels(device: torch.device) -> bool:
    """Whether kernels in Gluon for compute capability 9.0 run: the installed Triton has to compile them."""
    return _GLUON_HAS_NAMES and device.type == "cuda" and compute_capability(device) == (9, 0)


def is_capturing(device: torch.device) -> bool:
    """Whether launches are now captured in a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
