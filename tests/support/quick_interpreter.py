"""Triton's interpreter without its slowest parts, which change no result: it takes two thirds of its time.

It replaces builtins of triton.language at each call of a device function, computes whether integers overflow for
assertions that it does not make, and derives shapes and types of numpy for each value from the value's type. Its dots
sum in float64, so that tests of equal bits do not depend on the machine's BLAS. Numbers become e4m3 as GPUs round them:
the interpreter loses the carry where a number is rounded up to a power of two.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

PLAIN = {int, float, bool, str, type(None), tl.tensor, tl.dtype, tl.pointer_type, tl.block_type}  # as they are
NO_SHAPE = tl.tuple([]), tl.constexpr(1)  # of a scalar


def use() -> None:
    """Call it before any kernel runs; a second call does nothing."""
    if interpreter._patch_builtin.__module__ == __name__:
        return
    is_interpreted = isinstance(tl.cdiv, interpreter.InterpretedFunction)
    assert is_interpreted, "a test module imported Triton before TRITON_INTERPRET was set"
    assert not interpreter.interpreter_builder.options.debug, "assertions about overflows are made"
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    tl.core._unwrap_if_constexpr = partial(_unwrapped, tl.core._unwrap_if_constexpr)
    interpreter._get_np_dtype = partial(_numpy_type, cache(interpreter._get_np_dtype))
    tl.tensor.__init__, tl.block_type.__init__ = _begin_tensor, _begin_block_type
    tl.block_type.name = property(lambda own: f"<{own.shape}, {own.element_ty}>")
    _find_builtins_once()
    _replace_once_a_kernel()
    _sum_dots_in_float64()
    _round_to_e4m3()


def _find_builtins_once() -> None:
    """Finds what the interpreter replaces in triton.language once, and replaces only what is not replaced yet.

    The interpreter's own function does the same after `inspect.getmembers` of each module.
    """
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


def _numpy_type(of_scalar: Callable[[tl.dtype], np.dtype[Any]], kind: Any) -> np.dtype[Any]:
    scalar = kind.scalar
    return np.dtype(np.uint64) if scalar.is_ptr() else of_scalar(scalar)


def _replace_once_a_kernel() -> None:
    """A device function replaces only what the kernel that calls it has not."""
    replaced: set[Any] = set()
    replace_all, plain_scope = interpreter._patch_lang, interpreter._LangPatchScope

    class Scope(plain_scope):
        def restore(self) -> None:
            super().restore()
            replaced.clear()

    def patch_lang(fn: Any) -> Any:
        seen = {value for value in fn.__globals__.values() if value is tl or value is tl.core}
        if seen and seen <= replaced:
            return Scope()
        replaced.update(seen)
        return replace_all(fn)

    interpreter._LangPatchScope, interpreter._patch_lang = Scope, patch_lang


def _unwrapped(of_any: Callable[[Any], Any], value: Any) -> Any:
    kind = value.__class__
    if kind is tl.constexpr:
        return value.value
    return value if kind in PLAIN else of_any(value)


def _begin_tensor(own: Any, handle: Any, kind: Any) -> None:
    """Does what `tl.tensor.__init__` does. Tensors of a type share their shape, which is never changed."""
    own.handle, own.type, own.dtype = handle, kind, kind.scalar
    own.shape, own.numel = kind.of_tensors if kind.is_block() else NO_SHAPE


def _begin_block_type(own: Any, element_ty: Any, shape: Any) -> None:
    """Does what `tl.block_type.__init__` does, and keeps the shape that its tensors have."""
    own.element_ty = element_ty
    own.shape, own.numel, own.of_tensors = _shapes(*tl.core._unwrap_shape(shape))


@cache
def _shapes(*sizes: int) -> tuple[Any, int, tuple[Any, Any]]:
    """Returns shape and number of elements of a type, and both of its tensors."""
    if not sizes:
        raise TypeError("0d block_type is forbidden")
    numel = tl.core.validate_block_shape(sizes)
    return tl.tuple(sizes), numel, (tl.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(numel))


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
