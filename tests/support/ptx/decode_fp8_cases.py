"""Decodes over 8-bit KV of `paged_decode_fp8`, compared with float64: for emulated launches and for a GPU."""

from dataclasses import dataclass

import torch

from blockyard.kernels.attention.combine import combine_splits_kernel
from blockyard.kernels.attention.paged_decode import paged_decode_reference
from blockyard.kernels.attention.paged_decode_fp8 import launch_decode_fp8
from blockyard.kernels.attention.score_rules import ScoreRules
from blockyard.kernels.attention.split_kv import SplitKVSchedule
from blockyard.kernels.kv_cache.paged_kv import PagedKVMetadata
from blockyard.kernels.programmatic_launch import supports_pdl


@dataclass(frozen=True, slots=True)
class Case:
    """lengths: of sequences, 0 for a padding row."""

    lengths: tuple[int, ...]
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 128
    block_size: int = 16
    kv_dtype: torch.dtype = torch.float8_e4m3fn
    dtype: torch.dtype = torch.bfloat16
    programs: int = 2  # of each K/V head
    split: int = 128  # keys of a split
    in_kernel: bool = False
    window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False
    size: float = 1.0  # of q


CASES = (
    Case((70, 0, 3)),
    Case((150,), 8, 1, 64, 8, torch.float8_e5m2, in_kernel=True, has_sinks=True, split=64),
    Case((33,), 12, 1),
    Case((100, 40), 3, 1, window=50, soft_cap=2.0, size=2.0**70, split=32),
)


def _schedule(case: Case, slots: torch.Tensor, device: str) -> SplitKVSchedule:
    """As of `schedule_split_kv`, which is not emulated; splits are dealt out in order."""
    work: list[tuple[int, ...]] = []
    row_splits: list[tuple[int, int]] = []
    for row, length in enumerate(case.lengths):
        first = max(length - (case.window or length), 0)
        begins = list(range(first, length, case.split)) or [0]
        row_splits.append((len(work), len(begins)))
        ends = [min(begin + case.split, length) for begin in begins]
        work += [(row, int(slots[row]), *ends_of, len(begins)) for ends_of in zip(begins, ends, strict=True)]
    starts = [len(work) * i // case.programs for i in range(case.programs + 1)]
    nan = float("nan")
    return SplitKVSchedule(
        torch.tensor(work, dtype=torch.int32, device=device).T.contiguous(),
        torch.tensor(starts, dtype=torch.int32, device=device),
        torch.tensor(row_splits, dtype=torch.int32, device=device).T.contiguous(),
        torch.full((len(work), case.heads, case.head_dim), nan, device=device),
        torch.full((len(work), case.heads), nan, device=device),
        torch.zeros(case.kv_heads, len(case.lengths), dtype=torch.int32, device=device),
    )


def check_case(case: Case, device: str) -> None:
    """Raises AssertionError if the kernel's output differs from float64."""
    rows, width = len(case.lengths), -(-max(case.lengths) // case.block_size)
    blocks = rows * width + 3
    tables = torch.randperm(blocks)[: rows * width].view(rows, width).int()
    layer = torch.full((blocks, 2, case.kv_heads, case.block_size, case.head_dim), float("nan"))
    for row, length in enumerate(case.lengths):
        for i in range(length):
            token = torch.randn(2, case.kv_heads, case.head_dim)
            layer[tables[row, i // case.block_size], :, :, i % case.block_size] = token
        tables[row, -(-length // case.block_size) :] = 2**30  # must not be read
    slots = torch.tensor([row if length else -1 for row, length in enumerate(case.lengths)])
    positions = torch.tensor(case.lengths).sub(1).clamp_min(0)
    seqs = PagedKVMetadata(slots.to(device), positions.to(device), tables.to(device))
    layer = layer.to(case.kv_dtype).to(device)
    wide = torch.randn(rows, case.heads + 3, case.head_dim) * case.size
    q = wide.to(device, case.dtype)[:, : case.heads]
    q = q.contiguous() if device == "cpu" else q  # as emulated tensors have to be
    sinks = torch.linspace(-2, 3, case.heads, device=device) if case.has_sinks else None
    rules = ScoreRules(
        scale=0.1 / case.size, window=case.window, soft_cap=case.soft_cap, sinks=sinks,
        kv_scales=torch.tensor([0.5, 3.0], device=device),
    )  # fmt: skip
    schedule = _schedule(case, slots, device)
    out = torch.full((rows, case.heads * case.head_dim), float("nan"), dtype=case.dtype, device=device)
    pdl = supports_pdl(q.device)
    launch_decode_fp8(q, layer, seqs, rules, out, schedule, case.in_kernel, pdl)
    if not case.in_kernel:
        combine_splits_kernel[(rows, case.heads, 1)](
            schedule.row_splits, schedule.partial_out, schedule.lse, out, rows, 1,
            HEADS=case.heads, HEAD_DIM=case.head_dim, DIM=case.head_dim, SPLITS=4, sinks_ptr=rules.sinks, num_warps=4,
        )  # fmt: skip
    want = paged_decode_reference(q.double(), layer, seqs, rules)
    error = float((out.double() - want).norm() / want.norm())
    assert error <= (4e-3 if case.dtype == torch.bfloat16 else 1e-3), (case, error)
    assert not schedule.semaphores.any()
