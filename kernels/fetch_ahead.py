"""Brings the first weights of the next linear layer to the L2 cache, so that memory does not wait between kernels.

A linear layer of a decode step is over when its weights are read. Until the next one is under way, and while norms and
attention run, memory would have nothing to do; the L2 cache has room for what that next layer reads first.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

LINE_BYTES = 128
_LINES = 128  # that a program asks for at a time


@dataclass(frozen=True, slots=True)
class Ahead:
    """Of the next layer: the first `width` elements of each of `parts` equal parts of its first `height` rows."""

    weight: Tensor  # [out, in], contiguous
    height: int
    width: int
    parts: int

    def arguments(self) -> dict[str, object]:
        """For the kernel that has to ask for it."""
        line = LINE_BYTES // self.weight.element_size()
        size = self.weight.shape[1]
        lines = self.height * self.parts * triton.cdiv(self.width, line)
        return {
            "ahead_ptr": self.weight,
            "ahead_lines": lines,
            "ahead_width": triton.cdiv(self.width, line),
            "ahead_parts": self.parts,
            "ahead_step": size // self.parts,
            "ahead_size": size,
        }


def nothing(weight: Tensor) -> dict[str, object]:
    """Arguments of a kernel that has nothing to ask for."""
    counts = dict.fromkeys(("ahead_lines", "ahead_width", "ahead_parts", "ahead_step", "ahead_size"), 0)
    return {"ahead_ptr": weight, **counts}


@triton.jit
def fetch_ahead(ptr, lines, width, parts, step, size, program, programs):
    """Program's share of `lines`, each of LINE_BYTES."""
    elements: tl.constexpr = 1024 // ptr.dtype.element_ty.primitive_bitwidth
    share = tl.cdiv(lines, programs)
    for start in range(0, share, 128):
        line = tl.minimum(program * share + start + tl.arange(0, 128), lines - 1)
        part = line // width % parts
        row = (line // (width * parts)).to(tl.int64)
        place = row * size + tl.minimum(part * step + line % width * elements, size - 1)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [ptr + place], dtype=tl.int32, is_pure=False, pack=1
        )
