"""Comparison of modules with ours, on copies of them that run on the CPU."""

import copy
import inspect
from collections.abc import Callable

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn

# what a module may raise that our way of running does not fit
PROBLEMS = (
    *(RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError, NotImplementedError, ImportError),
    StrictDataclassError,  # a config that contradicts itself
)
# largest difference to the size of the result, where 16 bits are rounded at other places
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


class Numbers:
    """Random numbers on the CPU that are the same in each start, and leave torch's own generator alone."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.generator = torch.Generator(device="cpu").manual_seed(7)

    def __call__(self, *shape: int, scale: float = 1.0) -> Tensor:
        made = torch.randn(shape, generator=self.generator, device="cpu") * scale
        return made.to(self.dtype)


def copy_module(module: nn.Module) -> nn.Module:
    """A copy with parameters and children of its own to set; everything else is shared."""
    made = copy.copy(module)
    made.__dict__["_parameters"] = dict(module._parameters)
    made.__dict__["_modules"] = dict(module._modules)
    return made


def agree(theirs: Tensor, ours: Tensor) -> bool:
    """Whether both are the same up to rounding: shapes, dtypes and numbers."""
    if theirs.shape != ours.shape or theirs.dtype != ours.dtype or theirs.device != ours.device:
        return False
    tolerance, size = TOLERANCE[ours.dtype], float(ours.float().square().mean().sqrt())
    return torch.allclose(theirs.float(), ours.float(), rtol=tolerance, atol=tolerance * size)


def holds(compare: Callable[[Numbers], bool]) -> bool:
    """Whether a comparison holds in float32 and in bfloat16. One that cannot run does not."""
    try:
        with torch.inference_mode():
            return all(compare(Numbers(dtype)) for dtype in TOLERANCE)
    except PROBLEMS:
        return False


def is_plain(module: nn.Module, num_arguments: int | None = None) -> bool:
    """Whether only the class says what the module computes. num_arguments: that its forward takes, without self."""
    forward = type(module).forward
    hooks = (module._forward_hooks, module._forward_pre_hooks)
    if "forward" in module.__dict__ or any(hooks) or not hasattr(forward, "__code__"):
        return False
    code = forward.__code__
    takes_more = code.co_kwonlyargcount or code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS)
    return num_arguments is None or (code.co_argcount == num_arguments + 1 and not takes_more)
