"""Triton's interpreter without its slowest part: at each call of a device function it lists all of triton.language."""

from typing import Any

import numpy as np
import pytest
import triton.language as tl
from triton.runtime import interpreter


def use() -> None:
    """Finds what the interpreter replaces in triton.language once, and replaces only what is not replaced yet.

    The interpreter's own function does the same after `inspect.getmembers` of each module, about a third of a kernel's
    time. Call it before any kernel runs; a second call does nothing.
    """
    if interpreter._patch_builtin.__module__ == __name__:
        return
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


def sum_dots_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a column of `tl.dot` independent of its place: some BLAS kernels sum the last columns in another order."""

    def create_dot(builder: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        total = np.matmul(a.data, b.data, dtype=np.float64) + d.data
        return interpreter.TensorHandle(total.astype(d.data.dtype), d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
