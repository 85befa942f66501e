"""Triton's interpreter without its slowest part, the list of all of triton.language at each call of a device function.

Its dots sum in float64, so that tests of equal bits do not depend on the machine's BLAS. Numbers become e4m3 as GPUs
round them: the interpreter loses the carry where a number is rounded up to a power of two.
"""

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter


def use() -> None:
    """Finds what the interpreter replaces in triton.language once, and replaces only what is not replaced yet.

    The interpreter's own function does the same after `inspect.getmembers` of each module, about a third of a kernel's
    time. Call it before any kernel runs; a second call does nothing.
    """
    if interpreter._patch_builtin.__module__ == __name__:
        return
    is_interpreted = isinstance(tl.cdiv, interpreter.InterpretedFunction)
    assert is_interpreted, "a test module imported Triton before TRITON_INTERPRET was set"
    places = (tl, tl.core, tl.tensor, tl.math, tl.core.tensor_descriptor_base)
    patch_all, patch_one = interpreter._patch_builtin, interpreter._patch_attr
    found = {
        place: [(name, member) for name, member in vars(place).items() if tl.core.is_builtin(member)]
        for place in places
    }

    def patch_builtin(place: Any, *scope: Any) -> None:
        if place not in found:
            patch_all(place, *scope)
        for name, member in found.get(place, ()):
            if getattr(place, name) is member:
                patch_one(place, name, member, *scope)

    interpreter._patch_builtin = patch_builtin
    _sum_dots_in_float64()
    _round_to_e4m3()


def _sum_dots_in_float64() -> None:
    """Makes a column of `tl.dot` independent of its place: some BLAS kernels sum the last columns in another order."""
    builder = interpreter.InterpreterBuilder
    plain_dot = builder.create_dot

    def create_dot(own: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        if a.dtype.primitive_bitwidth == 8 or b.dtype.primitive_bitwidth == 8:
            return plain_dot(own, a, b, d, *options)
        total = np.matmul(a.data, b.data, dtype=np.float64) + d.data
        return interpreter.TensorHandle(total.astype(d.data.dtype), d.dtype.scalar)

    builder.create_dot = create_dot


def _round_to_e4m3() -> None:
    plain = interpreter._convert_float

    def convert(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if target != tl.float8e4nv or source not in (tl.float32, tl.float16):
            return plain(data, source, target, rounding)
        numbers = torch.from_numpy(np.ascontiguousarray(data).astype(np.float32)).clamp(-448.0, 448.0)
        return numbers.to(torch.float8_e4m3fn).view(torch.uint8).numpy().reshape(np.shape(data))

    interpreter._convert_float = convert
