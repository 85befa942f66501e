"""Words in host memory that get the number of a step: the host polls them to see how far the step has come."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockyard.kernels.tensor_checks import check_tensor


def record_step_reference(step: Tensor, words: Tensor, index: int) -> None:
    words[index] = step[0]


@triton.jit(do_not_specialize=["index"])
def _record_step_kernel(step_ptr, words_ptr, index):
    # one program
    tl.store(words_ptr + index, tl.load(step_ptr))


def record_step(step: Tensor, words: Tensor, index: int) -> None:
    """words[index] = step[0], once all kernels before this one on its stream are complete.

    step [1] int32 is `SlotState.step`; words [n] int32 are in pinned memory, or on the device. The kernel is launched
    without PDL (see `programmatic_launch`), so it starts only after the kernel before it has ended: a kernel that the
    host launches when it has seen the number, on any stream, reads what they have written. Raises ValueError for other
    shapes and dtypes, and for an index outside of words.
    """
    check_tensor("step", step, (1,), torch.int32)
    check_tensor("words", words, (words.numel(),), torch.int32)
    if not 0 <= index < len(words):
        raise ValueError(f"index: expected 0 to {len(words) - 1}, got {index}")
    _record_step_kernel[(1,)](step, words, index, num_warps=1)
