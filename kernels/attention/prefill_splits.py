"""Split-KV of prefill attention: how many programs share the keys of a query tile, and the sum of what they store.

`paged_prefill` and `prefill_hopper` call this before and after their kernels.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from blockyard.kernels.attention.combine import combine_prefill_kernel
from blockyard.kernels.attention.score_rules import ScoreRules
from blockyard.kernels.int_math import ceil_div, next_power_of_2

MULTIPROCESSORS = 132  # with fewer programs, keys are split
SPLIT_MIN_LEN = 1024  # shorter sequences are not worth a combine kernel
_MAX_SPLITS = 16
_COMBINE_US = 3.0  # the combine kernel's launch
_SPLIT_US = 3.2e-6  # an element of a split, written and read: 8 bytes at 2.5 TB/s


@dataclass(frozen=True, slots=True)
class PrefillSplits:
    """The splits of each query tile's keys, and where the kernel stores."""

    num: int
    out: Tensor  # the output itself, or [rows, heads, num, head_dim] float32
    lse: Tensor  # [rows, heads, num] float32, log2 of the sum of exponentials; not used if num is 1

    def combine(self, out: Tensor, rules: ScoreRules) -> None:
        """Adds the splits up to out [rows, heads * head_dim]."""
        if self.num == 1:
            return
        rows, heads, _, head_dim = self.out.shape
        combine_prefill_kernel[(rows * heads,)](
            self.out, self.lse, out, self.num, HEADS=heads, HEAD_DIM=head_dim, DIM=max(next_power_of_2(head_dim), 16),
            MAX_SPLITS=_MAX_SPLITS, sinks_ptr=rules.sinks, num_warps=1,
        )  # fmt: skip


def split_prefill(
    q: Tensor, kv_heads: int, rules: ScoreRules, max_seq_len: int, out: Tensor, block_m: int, programs: int,
    key_us: float,
) -> PrefillSplits:  # fmt: skip
    """Splits keys for a kernel with tiles of `block_m` rows, of which `programs` run at a time on a multiprocessor.

    key_us: of a key of a program.
    """
    heads, head_dim, rows = q.shape[1], q.shape[2], len(out)
    num_keys = max_seq_len if rules.window is None else min(rules.window + rows, max_seq_len)
    work = ceil_div(rows * (heads // kv_heads), block_m) * kv_heads  # for one sequence; with several, some tiles are
    # not full
    num = num_splits(work, num_keys, programs * MULTIPROCESSORS, key_us, out.numel())
    if num == 1:
        return PrefillSplits(1, out, out)
    partial_out = torch.empty((rows, heads, num, head_dim), dtype=torch.float32, device=q.device)
    return PrefillSplits(num, partial_out, torch.empty((rows, heads, num), dtype=torch.float32, device=q.device))


def num_splits(programs: int, max_seq_len: int, max_programs: int, key_us: float, elements: int) -> int:
    """The number of splits of each query tile's keys that ends soonest, the combine kernel included.

    max_programs run at a time, each takes key_us for a key, and the output has this many elements.
    """
    if max_seq_len < SPLIT_MIN_LEN:
        return 1

    def time_us(num: int) -> float:
        rounds = ceil_div(programs * num, max_programs)
        combined = _COMBINE_US + num * elements * _SPLIT_US if num > 1 else 0.0
        return rounds * max_seq_len / num * key_us + combined

    return min(range(1, _MAX_SPLITS + 1), key=time_us)
