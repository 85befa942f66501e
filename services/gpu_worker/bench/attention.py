"""Times attention over the paged KV pool: decode and prefill, also with an 8-bit KV cache and batch-invariant.

Shapes of Llama-3.1-8B: 32 query heads, 8 KV heads, head size 128; blocks of 16 tokens in random order. The lower bound
of a decode is one read of its K and V.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from blockyard.kernels.attention.batch_invariant import batch_invariant_attention
from blockyard.kernels.attention.paged_decode import paged_decode, schedule_decode
from blockyard.kernels.attention.paged_prefill import paged_prefill
from blockyard.kernels.kv_cache.paged_kv import PagedKVMetadata
from blockyard.services.gpu_worker.bench.row import Row, row
from blockyard.services.gpu_worker.bench.timing import copies, graph_seconds

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 16
SCALE = HEAD_DIM**-0.5
LONGEST = 131072
KV_ELEMENTS = 2 * KV_HEADS * HEAD_DIM  # for each token
DECODES = {
    "1 x 300": [300],
    "1 x 8,000": [8000],
    "32 x 300": [300] * 32,
    "64 x 1,024": [1024] * 64,
    "64 x 4,096": [4096] * 64,
    "256 x 1,024": [1024] * 256,
    "1 x 131,072 + 31 x 4,096": [131072, *[4096] * 31],
}
PREFILLS = {  # (tokens in the cache, new tokens) of each sequence
    "2,048": [(0, 2048)],
    "8,192": [(0, 8192)],
    "2,048 after 8,192": [(8192, 2048)],
    "2,048 after 30,000": [(30000, 2048)],
    "20 after 16,384": [(16384, 20)],
    "128 after 16,384": [(16384, 128)],
    "512 after 16,384": [(16384, 512)],
    "8 x 256 after 4,096": [(4096, 256)] * 8,
    "32 x 128": [(0, 128)] * 32,
}
INVARIANT = ("1 x 300", "64 x 1,024", "256 x 1,024")


class Case:
    """Inputs for sequences of (cached, new) tokens. Small cases have several pools, to miss the L2 cache."""

    def __init__(self, spans: list[tuple[int, int]], dtype: torch.dtype = torch.bfloat16) -> None:
        sizes = [-(-(before + new) // BLOCK_SIZE) for before, new in spans]
        blocks = torch.randperm(sum(sizes), device="cuda").int()
        tables = torch.zeros(len(spans), max(sizes), dtype=torch.int32, device="cuda")
        for i, part in enumerate(torch.split(blocks, sizes)):
            tables[i, : len(part)] = part
        counts = torch.tensor([new for _, new in spans], device="cuda")
        positions = torch.cat([torch.arange(before, before + new, device="cuda") for before, new in spans])
        self.seqs = PagedKVMetadata(
            torch.arange(len(spans), device="cuda").repeat_interleave(counts), positions, tables
        )
        self.starts = torch.cat((counts.new_zeros(1), counts.cumsum(0))).int()
        self.num_bytes = sum(before + new for before, new in spans) * KV_ELEMENTS * dtype.itemsize
        self.operations = sum(4.0 * HEADS * HEAD_DIM * (n * b + n * (n + 1) / 2) for b, n in spans)
        size = (len(blocks), 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM)
        self.layers = [torch.randn(size, device="cuda").to(dtype) for _ in range(copies(self.num_bytes))]
        qkv = torch.randn(len(positions), HEADS + 2 * KV_HEADS, HEAD_DIM, device="cuda").bfloat16()
        self.q = qkv[:, :HEADS]
        self.out = torch.empty(len(positions), HEADS * HEAD_DIM, dtype=torch.bfloat16, device="cuda")
        self.scales = torch.ones(2, device="cuda") if dtype.itemsize == 1 else None


def measure() -> list[Row]:
    with torch.inference_mode():
        rows = [_decode(name, lengths) for name, lengths in DECODES.items()]
        rows.append(_decode("64 x 4,096", DECODES["64 x 4,096"], torch.float8_e4m3fn))
        rows += [_prefill(name, spans) for name, spans in PREFILLS.items()]
        rows += [_invariant_decode(name) for name in INVARIANT]
        rows.append(_invariant_prefill("8,192", PREFILLS["8,192"]))
    return rows


def _of_lengths(lengths: list[int], dtype: torch.dtype = torch.bfloat16) -> Case:
    return Case([(length - 1, 1) for length in lengths], dtype)


def _decode(name: str, lengths: list[int], dtype: torch.dtype = torch.bfloat16) -> Row:
    case = _of_lengths(lengths, dtype)
    schedule = schedule_decode(case.q, case.layers[0], case.seqs, None, LONGEST)  # not timed: runs once a step

    def attend(layer: Tensor) -> None:
        paged_decode(case.q, layer, case.seqs, SCALE, None, LONGEST, case.out, schedule=schedule, scales=case.scales)

    kind = "" if dtype == torch.bfloat16 else ", KV in 8 bits"
    return row(f"decode attention{kind}", name, _seconds(case, attend), case.num_bytes)


def _prefill(name: str, spans: list[tuple[int, int]]) -> Row:
    case, longest = Case(spans), max(before + new for before, new in spans)

    def attend(layer: Tensor) -> None:
        paged_prefill(case.q, layer, case.seqs, case.starts, SCALE, None, longest, case.out)

    return row("prefill attention", name, _seconds(case, attend), case.num_bytes, case.operations)


def _invariant_decode(name: str) -> Row:
    case = _of_lengths(DECODES[name])

    def attend(layer: Tensor) -> None:
        batch_invariant_attention(case.q, layer, case.seqs, case.starts, SCALE, None, LONGEST, case.out, True)

    return row("decode attention, batch-invariant", name, _seconds(case, attend), case.num_bytes)


def _invariant_prefill(name: str, spans: list[tuple[int, int]]) -> Row:
    case = Case(spans)

    def attend(layer: Tensor) -> None:
        batch_invariant_attention(case.q, layer, case.seqs, case.starts, SCALE, None, LONGEST, case.out, False)

    return row("prefill attention, batch-invariant", name, _seconds(case, attend), case.num_bytes, case.operations)


def _seconds(case: Case, attend: Callable[[Tensor], None]) -> float:
    return graph_seconds([partial(attend, layer) for layer in case.layers])
