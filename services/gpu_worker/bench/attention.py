"""Times attention over the paged KV pool: decode and prefill, also with an 8-bit KV cache and batch-invariant.

Shapes of Llama-3.1-8B: 32 query heads, 8 KV heads, head size 128; blocks of 16 tokens in random order. Some rows have
the larger heads of Gemma-4-26B-A4B, or the smaller ones of gpt-oss-20b. The lower bound of a decode is one read of its
K and V. Rows of a window say which part of the time without the window they take.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from blockyard.kernels.attention.batch_invariant import batch_invariant_attention
from blockyard.kernels.attention.packed.packed_attention import packed_attention
from blockyard.kernels.attention.paged_decode import paged_decode, schedule_decode
from blockyard.kernels.attention.score_rules import ScoreRules
from blockyard.kernels.gpu_facts import runs_hopper_kernels
from blockyard.kernels.kv_cache.paged_kv import PagedKVMetadata
from blockyard.services.gpu_worker.attention.choice import AttentionCase, RowKind, choose
from blockyard.services.gpu_worker.attention.triton_attention import KERNELS, KernelRows
from blockyard.services.gpu_worker.bench.row import Row, row
from blockyard.services.gpu_worker.bench.timing import copies, graph_seconds
from blockyard.services.gpu_worker.kv.pool import LayerKV
from blockyard.services.gpu_worker.layers.attention import AttentionShape


class HeadShape(NamedTuple):
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None

    def __str__(self) -> str:
        window = "" if self.window is None else f", window {self.window:,}"
        return "" if self == LLAMA else f", {self.heads} heads of {self.head_dim} on {self.kv_heads}{window}"

    def rules(self, kv_scales: Tensor | None = None) -> ScoreRules:
        return ScoreRules(scale=self.head_dim**-0.5, window=self.window, kv_scales=kv_scales)


LLAMA = HeadShape(32, 8, 128)
GPT_OSS = HeadShape(64, 8, 64)
GEMMA = (HeadShape(16, 8, 256, 1024), HeadShape(16, 8, 256), HeadShape(16, 2, 512))
BLOCK_SIZE = 16
LONGEST = 131072
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
WINDOWED = ((LLAMA, 1024), (GPT_OSS, 128), (GEMMA[1], 1024))  # prefills of 8,192 with and without a window
PACKED = ((64, 512), (256, 128), (2048, 16))  # texts of an encoder, and tokens of each
LARGE_HEADS = (("1 x 300", "1 x 8,000", "64 x 1,024"), ("2,048", "8,192"))  # decodes, prefills


class Case:
    """Inputs for sequences of (cached, new) tokens. Small cases have several pools, to miss the L2 cache."""

    def __init__(
        self, spans: list[tuple[int, int]], dtype: torch.dtype = torch.bfloat16, shape: HeadShape = LLAMA
    ) -> None:
        heads, kv_heads, head_dim, window = shape
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
        self.shape, most = shape, window or LONGEST
        read = sum(min(before + new, most + new) for before, new in spans)
        self.num_bytes = read * 2 * kv_heads * head_dim * dtype.itemsize
        keys = sum(min(before + i + 1, most) for before, new in spans for i in range(new))
        self.operations = 4.0 * heads * head_dim * keys
        size = (len(blocks), 2, kv_heads, BLOCK_SIZE, head_dim)
        self.layers = [torch.randn(size, device="cuda").to(dtype) for _ in range(copies(self.num_bytes))]
        qkv = torch.randn(len(positions), heads + 2 * kv_heads, head_dim, device="cuda").bfloat16()
        self.q = qkv[:, :heads]
        self.out = torch.empty(len(positions), heads * head_dim, dtype=torch.bfloat16, device="cuda")
        self.scales = torch.ones(2, device="cuda") if dtype.itemsize == 1 else None


def measure() -> list[Row]:
    with torch.inference_mode():
        rows = [decode_row(name, lengths) for name, lengths in DECODES.items()]
        rows.append(decode_row("64 x 4,096", DECODES["64 x 4,096"], torch.float8_e4m3fn))
        rows += [prefill_row(name, spans) for name, spans in PREFILLS.items()]
        rows += [_invariant_decode(name) for name in INVARIANT]
        rows.append(_invariant_prefill("8,192", PREFILLS["8,192"]))
        for shape in GEMMA:
            rows += [decode_row(name, DECODES[name], shape=shape) for name in LARGE_HEADS[0]]
            rows += [prefill_row(name, PREFILLS[name], shape) for name in LARGE_HEADS[1]]
        rows += [prefill_row(name, PREFILLS[name], GPT_OSS) for name in LARGE_HEADS[1]]
        rows += [_windowed_prefill("8,192", *windowed) for windowed in WINDOWED]
        rows += [_packed(*texts) for texts in PACKED]
    return rows


def _packed(texts: int, tokens: int) -> Row:
    """Attention to both sides, of bge-base's 12 heads of 64."""
    shape = HeadShape(12, 12, 64)
    rules = ScoreRules(scale=shape.head_dim**-0.5, both_sides=True)
    starts = torch.arange(0, (texts + 1) * tokens, tokens, dtype=torch.int32, device="cuda")
    qkv = torch.randn(texts * tokens, 3 * shape.heads, shape.head_dim, device="cuda").bfloat16()
    out = torch.empty(texts * tokens, shape.heads * shape.head_dim, dtype=torch.bfloat16, device="cuda")
    seconds = graph_seconds([partial(packed_attention, qkv, starts, rules, shape.heads, tokens, out)] * 8)
    operations = 4.0 * texts * tokens**2 * shape.heads * shape.head_dim
    return row("encoder attention", f"{texts} x {tokens}{shape}", seconds, qkv.nbytes + out.nbytes, operations)


def _of_lengths(lengths: list[int], dtype: torch.dtype = torch.bfloat16, shape: HeadShape = LLAMA) -> Case:
    return Case([(length - 1, 1) for length in lengths], dtype, shape)


def decode_row(name: str, lengths: list[int], dtype: torch.dtype = torch.bfloat16, shape: HeadShape = LLAMA) -> Row:
    case = _of_lengths(lengths, dtype, shape)
    rules = shape.rules(case.scales)
    schedule = schedule_decode(case.q, case.layers[0], case.seqs, rules, LONGEST)  # not timed: runs once a step

    def attend(layer: Tensor) -> None:
        paged_decode(case.q, layer, case.seqs, rules, LONGEST, case.out, schedule)

    kind = "" if dtype == torch.bfloat16 else ", KV in 8 bits"
    return row(f"decode attention{kind}", f"{name}{shape}", _seconds(case, attend), case.num_bytes)


def prefill_row(name: str, spans: list[tuple[int, int]], shape: HeadShape = LLAMA) -> Row:
    case, longest = Case(spans, shape=shape), max(before + new for before, new in spans)
    rules, rows = shape.rules(), KernelRows(case.seqs, case.starts, longest)
    layer = AttentionShape(num_heads=shape.heads, kv_heads=shape.kv_heads, head_dim=shape.head_dim, rules=rules)
    kernel = KERNELS[choose(AttentionCase(
        device="cuda", kind=RowKind.PREFILL, kv_dtype=torch.bfloat16, layer=layer, block_size=BLOCK_SIZE,
        runs_hopper=runs_hopper_kernels(case.q.device), max_seq_len=longest,
    ))]  # fmt: skip

    def attend(memory: Tensor) -> None:
        kernel.attend(case.q, LayerKV(memory, rules), rows, case.out, None)

    return row("prefill attention", f"{name}{shape}", _seconds(case, attend), case.num_bytes, case.operations)


def _windowed_prefill(name: str, shape: HeadShape, window: int) -> Row:
    whole = prefill_row(name, PREFILLS[name], shape)
    windowed = prefill_row(name, PREFILLS[name], shape._replace(window=window))
    return windowed._replace(rate=f"{windowed.us / whole.us:.2f} of the time without the window")


def _invariant_decode(name: str) -> Row:
    case = _of_lengths(DECODES[name])

    def attend(layer: Tensor) -> None:
        batch_invariant_attention(case.q, layer, case.seqs, case.starts, LLAMA.rules(), LONGEST, case.out, True)

    return row("decode attention, batch-invariant", name, _seconds(case, attend), case.num_bytes)


def _invariant_prefill(name: str, spans: list[tuple[int, int]]) -> Row:
    case = Case(spans)

    def attend(layer: Tensor) -> None:
        batch_invariant_attention(case.q, layer, case.seqs, case.starts, LLAMA.rules(), LONGEST, case.out, False)

    return row("prefill attention, batch-invariant", name, _seconds(case, attend), case.num_bytes, case.operations)


def _seconds(case: Case, attend: Callable[[Tensor], None]) -> float:
    return graph_seconds([partial(attend, layer) for layer in case.layers])
