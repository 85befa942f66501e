"""Times latent attention with the sizes of DeepSeek's models: rows of 512 + 64 numbers, heads of 192 and 128.

V2-Lite has 16 heads, V3 has 128. The lower bound of a decode is one read of its rows, or its operations:
each head reads all 576 numbers for scores and 512 for values.
"""

from functools import partial

import torch
from torch import Tensor

from blockyard.kernels.attention.latent.head_products import head_products
from blockyard.kernels.attention.latent.latent_invariant import latent_invariant
from blockyard.kernels.attention.latent.latent_prefill import latent_prefill
from blockyard.kernels.attention.latent.prefill_in_pieces import prefill_in_pieces
from blockyard.kernels.attention.latent.write_latent import write_latent
from blockyard.kernels.attention.score_rules import ScoreRules
from blockyard.kernels.gpu_facts import runs_hopper_kernels
from blockyard.kernels.kv_cache.paged_kv import PagedKVMetadata
from blockyard.services.gpu_worker.attention.choice import AttentionCase, RowKind, choose
from blockyard.services.gpu_worker.attention.triton_latent import LATENT_DECODES
from blockyard.services.gpu_worker.bench.row import Row, row
from blockyard.services.gpu_worker.bench.timing import DEVICE, copies, graph_seconds
from blockyard.services.gpu_worker.layers.attention import AttentionShape

LATENT, ROTATED, PLAIN, VALUE = 512, 64, 128, 128
BLOCK_SIZE = 16
DTYPE, SCALE = torch.bfloat16, (PLAIN + ROTATED) ** -0.5
RULES = ScoreRules(scale=SCALE)
LONGEST = 131072
DECODES = (
    (64, 4096, 16), (64, 4096, 128), (1, 32768, 16), (64, 1024, 16), (1, 1024, 16), (1, 200, 16), (256, 1024, 128),
)  # fmt: skip
PREFILLS = ((0, 8192, 16), (0, 2048, 16), (0, 2048, 128))  # tokens in the cache, new tokens, heads
PIECES = ((0, 8192, 16), (8192, 2048, 16), (30000, 128, 16), (8192, 2048, 128))
PRODUCT_ROWS = (1, 64, 2048)
ROWS = (1, 64, 2048)


def measure() -> list[Row]:
    with torch.inference_mode(), torch.device(DEVICE):
        rows = [_decode(*case) for case in DECODES]
        rows += [_decode(*DECODES[0], torch.float8_e4m3fn), _invariant(*DECODES[0])]
        rows += [_prefill(*case) for case in PREFILLS]
        rows += [_pieces(*case) for case in PIECES]
        rows += [_products(num, heads) for heads in (16, 128) for num in PRODUCT_ROWS]
        return rows + [_write(num) for num in ROWS]


def sequences(num_seqs: int, before: int, new: int) -> PagedKVMetadata:
    """Sequences of `before + new` tokens, of which the last are rows of the step; blocks in random order."""
    width = -(-(before + new) // BLOCK_SIZE)
    tables = torch.randperm(num_seqs * width).view(num_seqs, width).int()
    slots = torch.arange(num_seqs).repeat_interleave(new)
    return PagedKVMetadata(slots, torch.arange(before, before + new).repeat(num_seqs), tables)


def _layers(seqs: PagedKVMetadata, num_bytes: int, dtype: torch.dtype) -> list[Tensor]:
    size = (seqs.tables.numel(), 1, 1, BLOCK_SIZE, LATENT + ROTATED)
    return [torch.randn(size).to(dtype) for _ in range(copies(num_bytes))]


def _query(rows: int, heads: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, heads, LATENT).to(DTYPE), torch.randn(rows, heads, PLAIN + ROTATED).to(DTYPE)[..., PLAIN:]


def _decode(num_seqs: int, length: int, heads: int, dtype: torch.dtype | None = None) -> Row:
    kind, seqs, q = dtype or DTYPE, sequences(num_seqs, length - 1, 1), _query(num_seqs, heads)
    num_bytes = num_seqs * length * (LATENT + ROTATED) * kind.itemsize
    rules = ScoreRules(scale=SCALE, kv_scales=torch.ones(2) if dtype is not None else None)
    layers, out = _layers(seqs, num_bytes, kind), torch.empty_like(q[0])
    shape = AttentionShape(num_heads=heads, kv_heads=1, head_dim=LATENT + ROTATED, rules=rules, latent_dim=LATENT)
    kernel = LATENT_DECODES[choose(AttentionCase(
        device="cuda", kind=RowKind.DECODE, kv_dtype=kind, layer=shape, block_size=BLOCK_SIZE,
        runs_hopper=runs_hopper_kernels(q[0].device),
    ))]  # fmt: skip
    schedule = kernel.schedule(q[0], seqs, rules, LONGEST)  # not timed: runs once a step
    calls = [partial(kernel.attend, *q, layer, seqs, rules, LONGEST, out, schedule) for layer in layers]
    name = "latent decode" + (", KV in 8 bits" if dtype is not None else "")
    operations = 2.0 * num_seqs * heads * length * (2 * LATENT + ROTATED)
    return row(name, f"{num_seqs} x {length:,}, {heads} heads", graph_seconds(calls), num_bytes, operations)


def _invariant(num_seqs: int, length: int, heads: int) -> Row:
    seqs, q = sequences(num_seqs, length - 1, 1), _query(num_seqs, heads)
    num_bytes = num_seqs * length * (LATENT + ROTATED) * DTYPE.itemsize
    calls = [
        partial(latent_invariant, *q, layer, seqs, RULES, LONGEST, True) for layer in _layers(seqs, num_bytes, DTYPE)
    ]
    shape = f"{num_seqs} x {length:,}, {heads} heads"
    return row("latent decode, batch-invariant", shape, graph_seconds(calls), num_bytes)


def _prefill(before: int, new: int, heads: int) -> Row:
    """Attention alone, over K and V that are decompressed."""
    seqs, starts = sequences(1, before, new), torch.tensor([0, new], dtype=torch.int32)
    query, kv = torch.randn(new, heads, PLAIN + ROTATED).to(DTYPE), torch.randn(new, heads, PLAIN + VALUE).to(DTYPE)
    shared, out = torch.randn(new, ROTATED).to(DTYPE), torch.empty(new, heads * VALUE, dtype=DTYPE)
    seconds = graph_seconds([partial(latent_prefill, query, kv, shared, seqs, starts, RULES, out)] * 2)
    return row("latent prefill attention", f"{new:,}, {heads} heads", seconds, kv.nbytes, _causal(before, new, heads))


def _causal(before: int, new: int, heads: int) -> float:
    return 2.0 * heads * (PLAIN + ROTATED + VALUE) * (new * before + new * (new + 1) / 2)


def _pieces(before: int, new: int, heads: int) -> Row:
    """With gathering and decompression; operations of decompression count, too."""
    seqs, starts = sequences(1, before, new), torch.tensor([0, new], dtype=torch.int32)
    query, rows = torch.randn(new, heads, PLAIN + ROTATED).to(DTYPE), torch.randn(new, LATENT + ROTATED).to(DTYPE)
    up, out = torch.randn(heads, PLAIN + VALUE, LATENT).to(DTYPE), torch.empty(new, heads * VALUE, dtype=DTYPE)
    (layer,) = _layers(seqs, 1 << 40, DTYPE)[:1]
    call = partial(prefill_in_pieces, query, rows, layer, seqs, starts, RULES, up, before, out)
    operations = _causal(before, new, heads) + 2.0 * (before + new) * up.numel()
    shape = f"{new:,} after {before:,}, {heads} heads"
    return row("latent prefill in pieces", shape, graph_seconds([call]), layer.nbytes, operations)


def _products(rows: int, heads: int) -> Row:
    """Both products of a decode: queries into the latent, and values out of it."""
    num_bytes = heads * (PLAIN + VALUE) * LATENT * DTYPE.itemsize
    ups = [torch.randn(heads, PLAIN + VALUE, LATENT).to(DTYPE) for _ in range(copies(num_bytes))]
    query, latent = torch.randn(rows, heads, PLAIN).to(DTYPE), torch.randn(rows, heads, LATENT).to(DTYPE)

    def both(up: Tensor) -> None:
        head_products(query, up[:, :PLAIN])
        head_products(latent, up[:, PLAIN:].mT)

    seconds = graph_seconds([partial(both, up) for up in ups])
    return row("absorbed products", f"{rows} rows, {heads} heads", seconds, num_bytes, 2.0 * rows * ups[0].numel())


def _write(rows: int) -> Row:
    heads, seqs = 16, sequences(rows, BLOCK_SIZE - 1, 1)
    query, new = torch.randn(rows, heads, PLAIN + ROTATED).to(DTYPE), torch.randn(rows, LATENT + ROTATED).to(DTYPE)
    (layer,), angles = _layers(seqs, 1 << 40, DTYPE)[:1], torch.randn(rows, 1, ROTATED // 2)
    rotation, weight = torch.polar(torch.ones_like(angles), angles), torch.randn(LATENT).to(DTYPE)
    num_bytes = rows * (2 * heads * ROTATED + 3 * (LATENT + ROTATED)) * DTYPE.itemsize
    seconds = graph_seconds([partial(write_latent, query, new, layer, seqs, rotation, weight, 1e-6)] * 8)
    return row("latent norm + rotation + KV write", f"{rows} rows, {heads} heads", seconds, num_bytes)
