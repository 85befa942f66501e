"""Triton kernels against their references in float64: odd sizes, strided rows, outputs poisoned with NaN."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from blockyard.kernels.attention import paged_decode as decode_file
from blockyard.kernels.attention import split_kv as cut_file
from blockyard.kernels.attention.paged_decode import paged_decode, paged_decode_reference
from blockyard.kernels.attention.score_rules import ScoreRules
from blockyard.kernels.attention.split_kv import schedule_split_kv
from blockyard.kernels.kv_cache import rope_write_kv as rope_file
from blockyard.kernels.kv_cache.paged_kv import PagedKVMetadata
from blockyard.kernels.kv_cache.rope_write_kv import rope_write_kv, rope_write_kv_reference
from blockyard.kernels.layers import act_mul as act_file
from blockyard.kernels.layers import add_rms_norm as norm_file
from blockyard.kernels.layers import norm_add_norm as chain_file
from blockyard.kernels.layers.act_mul import ACTIVATIONS, act_mul, act_mul_reference
from blockyard.kernels.layers.add_rms_norm import add_rms_norm, add_rms_norm_reference
from blockyard.kernels.layers.norm_add_norm import norm_add_norm, norm_add_norm_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ERROR = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}  # norm of the difference over the norm
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fills new tensors with NaN, so that unwritten elements are found."""
    torch.manual_seed(int.from_bytes(torch.randint(256, (4,)).numpy().tobytes()[:1]))

    def empty(*args: Any, **kwargs: Any) -> Tensor:
        floats = kwargs["dtype"].is_floating_point
        return torch.full(args[0] if isinstance(args[0], tuple) else args, float("nan") if floats else -99, **kwargs)

    class Torch:
        def __getattr__(self, name: str) -> Any:
            return empty if name == "empty" else getattr(torch, name)

    for file in (norm_file, chain_file, cut_file, decode_file, act_file):
        monkeypatch.setattr(file, "torch", Torch())


def rows_of(rows: int, columns: int, dtype: torch.dtype, gap: int = 3) -> Tensor:
    """Strided rows."""
    return torch.randn(rows, columns + gap, device=DEVICE).to(dtype)[:, :columns]


def assert_close(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    got, want = got.double(), want.double()
    assert got.shape == want.shape
    assert not got.isnan().any()
    error = float((got - want).norm() / want.norm().clamp_min(1e-12))
    assert error <= ERROR[dtype], f"relative error {error}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(1, 64), (3, 100), (5, 257), (0, 8), (2, 1)])
@pytest.mark.parametrize("add", [True, False])
def test_add_rms_norm(rows: int, size: int, add: bool, dtype: torch.dtype) -> None:
    residual, delta = rows_of(rows, size, dtype), rows_of(rows, size, dtype, gap=5) if add else None
    weight = torch.randn(size, device=DEVICE).to(dtype)
    total = residual.clone() if delta is None else residual + delta
    want = add_rms_norm_reference(total.double(), None, weight.double(), 1e-5)
    out = add_rms_norm(residual, delta, weight, 1e-5)
    assert torch.equal(residual, total)
    assert_close(out, want, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(1, 64), (3, 100), (0, 8)])
def test_add_rms_norm_to_a_new_sum(rows: int, size: int, dtype: torch.dtype) -> None:
    residual, delta = rows_of(rows, size, dtype), rows_of(rows, size, dtype, gap=5)
    weight, total = torch.randn(size, device=DEVICE).to(dtype), rows_of(rows, size, dtype, gap=1)
    before = residual.clone()
    out = add_rms_norm(residual, delta, weight, 1e-5, total)
    assert torch.equal(residual, before) and torch.equal(total, residual + delta)
    assert_close(out, add_rms_norm_reference(total.double(), None, weight.double(), 1e-5), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "addends", "size"), [(1, 8, 64), (3, 3, 100), (5, 1, 257), (0, 2, 8)])
def test_add_rms_norm_of_a_sum(rows: int, addends: int, size: int, dtype: torch.dtype) -> None:
    residual, weight = rows_of(rows, size, dtype), torch.randn(size, device=DEVICE).to(dtype)
    delta = torch.randn(rows, addends, size, device=DEVICE).to(dtype)
    expected = residual.clone()
    want = add_rms_norm_reference(expected, delta, weight, 1e-5)
    out = add_rms_norm(residual, delta, weight, 1e-5)
    assert_close(residual, expected, dtype)
    assert_close(out, want, dtype)
    with pytest.raises(ValueError, match="do not fit"):
        add_rms_norm(residual, delta[..., 1:], weight, 1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "inner"), [(1, 96), (3, 1025), (0, 4), (4, 1)])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_act_mul(activation: str, rows: int, inner: int, dtype: torch.dtype) -> None:
    gate_up = 4 * rows_of(rows, 2 * inner, dtype)
    assert_close(act_mul(gate_up, activation), act_mul_reference(gate_up.double(), activation), dtype)


@pytest.mark.parametrize("dtype", [torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])])
def test_norm_with_a_weight_in_float32(dtype: torch.dtype) -> None:
    residual, weight = rows_of(3, 100, dtype), 1 + torch.randn(100, device=DEVICE) / 512  # dtype would round it
    want = add_rms_norm_reference(residual.double(), None, weight.double(), 1e-5)
    assert_close(add_rms_norm(residual, None, weight, 1e-5), want, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(1, 64), (3, 100), (5, 257), (0, 8)])
@pytest.mark.parametrize(("then", "beside", "factor"), [(0, True, True), (1, False, False), (3, True, False)])
def test_norm_add_norm(then: int, beside: bool, factor: bool, rows: int, size: int, dtype: torch.dtype) -> None:
    residual, x, y = (rows_of(rows, size, dtype, gap) for gap in (3, 5, 7))
    weights = [torch.randn(size, device=DEVICE).to(torch.float32 if i % 2 else dtype) for i in range(3 + then)]
    both = (weights[1], y, weights[2]) if beside else None
    by = torch.full((1,), 0.7, device=DEVICE, dtype=dtype) if factor else None
    total = residual.double()
    exact = (weights[1].double(), y.double(), weights[2].double()) if beside else None
    norm_add_norm_reference(total, x, weights[0], 0.1, beside=exact, factor=by)
    before = x.clone()
    out = norm_add_norm(residual, x, weights[0], 0.1, weights[3:], beside=both, factor=by)
    assert torch.equal(x, before)
    assert_close(residual, total, dtype)
    want = [add_rms_norm_reference(residual.double(), None, one.double(), 0.1) for one in weights[3:]]
    assert len(out) == then
    for got, one in zip(out, want, strict=True):
        assert got.is_contiguous()
        assert_close(got, one, dtype)


def sequences(lengths: list[int], block_size: int, num_blocks: int) -> PagedKVMetadata:
    """Sequences in random slots; a length of 0 is a padding row."""
    num = len(lengths)
    width = -(-max([*lengths, 1]) // block_size)
    blocks = torch.randperm(num_blocks)[: num * width].view(num, width)
    tables = torch.full((num + 2, width), 2**30, dtype=torch.int32)  # must not be read
    order = torch.randperm(num + 2)[:num]
    for row, length in enumerate(lengths):
        used = -(-length // block_size)
        tables[order[row], :used] = blocks[row, :used].int()
    slots = torch.tensor([int(order[r]) if n else -1 for r, n in enumerate(lengths)], dtype=torch.int64)
    positions = torch.tensor([max(n - 1, 0) for n in lengths], dtype=torch.int64)
    return PagedKVMetadata(slots.to(DEVICE), positions.to(DEVICE), tables.to(DEVICE))


def pool_layer(seqs: PagedKVMetadata, num_blocks: int, kv_heads: int, block_size: int, head_dim: int) -> Tensor:
    """A pool layer with NaN wherever no sequence has a token."""
    layer = torch.full((num_blocks, 2, kv_heads, block_size, head_dim), float("nan"))
    for slot, position in zip(seqs.slots.tolist(), seqs.positions.tolist(), strict=True):
        for i in range(position + 1) if slot >= 0 else ():
            layer[seqs.tables[slot, i // block_size], :, :, i % block_size] = torch.randn(2, kv_heads, head_dim)
    return layer


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("lengths", "heads", "kv_heads", "head_dim", "block_size", "window"),
    [
        ([1, 65, 0, 17], 4, 2, 16, 8, None),
        ([300, 7], 3, 1, 24, 16, None),  # several splits
        ([140, 20, 64], 4, 4, 16, 8, 20),
        ([0, 0], 4, 2, 16, 8, None),
        ([129], 20, 1, 32, 5, 1000),
        ([40, 33], 2, 1, 200, 16, None),  # shorter tiles
        ([300, 17], 4, 2, 512, 16, None),
        ([50], 2, 1, 320, 16, 20),
        ([], 4, 2, 16, 8, None),
    ],
)
def test_paged_decode(
    lengths: list[int],
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    window: int | None,
    dtype: torch.dtype,
) -> None:
    seqs = sequences(lengths, block_size, 90)
    layer = pool_layer(seqs, 90, kv_heads, block_size, head_dim).to(DEVICE, dtype)
    q = rows_of(len(lengths), (heads + 3) * head_dim, dtype).view(len(lengths), heads + 3, head_dim)[:, :heads]
    rules = ScoreRules(scale=0.2, window=window)
    want = paged_decode_reference(q.double(), layer.double(), seqs, rules)
    assert_close(paged_decode(q, layer, seqs, rules, 400), want, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunk", [64, 20, 500])
def test_decodes_attend_within_their_chunk(chunk: int, dtype: torch.dtype) -> None:
    """Last keys of a chunk, first ones, rows of no slot, and chunks of several splits."""
    seqs = sequences([64, 65, 0, 130, 300], 8, 190)
    layer = pool_layer(seqs, 190, 2, 8, 16).to(DEVICE, dtype)
    q, rules = torch.randn(5, 4, 16, device=DEVICE).to(dtype), ScoreRules(scale=0.2, window=chunk, chunked=True)
    want = paged_decode_reference(q.double(), layer.double(), seqs, rules)
    assert_close(paged_decode(q, layer, seqs, rules, 400), want, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 200])
@pytest.mark.parametrize("combined_pairs", [0, 99])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_splits_are_combined_layer_by_layer(
    has_sinks: bool, window: int | None, combined_pairs: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One schedule serves two layers; one row has many splits, one has none. The last program combines, or a kernel."""
    monkeypatch.setattr(decode_file, "_COMBINE_IN_KERNEL_PAIRS", combined_pairs)
    seqs = sequences([560, 0, 70], 16, 120)
    q = torch.randn(3, 3, 24, device=DEVICE).to(dtype)
    layers = [pool_layer(seqs, 120, 1, 16, 24).to(DEVICE, dtype) for _ in range(2)]
    sinks = torch.tensor([3.0, -2.0, 1.0], device=DEVICE) if has_sinks else None
    rules = ScoreRules(scale=0.2, window=window, sinks=sinks)
    schedule = schedule_split_kv(seqs, 3, 1, 24, rules, 600, programs=8)
    assert int(schedule.row_splits[1, 0]) >= (5 if window is None else 2)
    for layer in layers:
        want = paged_decode_reference(q.double(), layer.double(), seqs, rules)
        assert_close(paged_decode(q, layer, seqs, rules, 600, schedule=schedule), want, dtype)
        assert not schedule.semaphores.any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_scores_are_capped(dtype: torch.dtype) -> None:
    seqs = sequences([90, 3], 8, 90)
    layer = pool_layer(seqs, 90, 2, 8, 16).to(DEVICE, dtype)
    q, rules = torch.randn(2, 4, 16, device=DEVICE).to(dtype), ScoreRules(scale=0.2, soft_cap=0.5)
    want = paged_decode_reference(q.double(), layer.double(), seqs, rules)
    assert_close(paged_decode(q, layer, seqs, rules, 400), want, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("heads", [3, 16])
def test_decode_with_sinks(heads: int, window: int | None, dtype: torch.dtype) -> None:
    """A sink of all weight, and one of none; groups of heads that fill a tile and that do not."""
    seqs = sequences([90, 0, 3], 8, 90)
    layer = pool_layer(seqs, 90, 1, 8, 16).to(DEVICE, dtype)
    q = torch.randn(3, heads, 16, device=DEVICE).to(dtype)
    sinks = torch.linspace(-3, 4, heads, device=DEVICE)
    sinks[0], sinks[-1] = 300.0, -300.0
    rules = ScoreRules(scale=0.2, window=window, sinks=sinks)
    want = paged_decode_reference(q.double(), layer.double(), seqs, rules)
    assert_close(paged_decode(q, layer, seqs, rules, 400), want, dtype)
    with pytest.raises(ValueError, match="sinks"):
        paged_decode(q, layer, seqs, replace(rules, sinks=sinks[1:]), 400)


@pytest.mark.parametrize(
    ("lengths", "window", "programs"),
    [
        ([131072, *[4096] * 31], None, 49),
        ([300], None, 49),
        ([0, 1, 64, 65, 0, 5000], 1000, 3),
        ([0], None, 8),
        ([7000, 129, 1], None, 1),
    ],
)
def test_splits_cover_every_key_once(lengths: list[int], window: int | None, programs: int) -> None:
    positions = torch.tensor([max(n - 1, 0) for n in lengths], device=DEVICE)
    slots = torch.tensor([5 * i if n else -1 for i, n in enumerate(lengths)], device=DEVICE)
    seqs = PagedKVMetadata(slots, positions, torch.zeros(1, 1, dtype=torch.int32, device=DEVICE))
    schedule = schedule_split_kv(seqs, 4, 2, 16, ScoreRules(scale=1.0, window=window), max(*lengths, 1), programs)
    starts = schedule.starts.tolist()
    count = starts[-1]
    assert count <= schedule.work.shape[1] and len(starts) - 1 <= max(programs // 2, 1)
    assert starts[0] == 0 and starts == sorted(starts)
    found: dict[int, list[tuple[int, int]]] = {row: [] for row in range(len(lengths))}
    for i, (row, slot, begin, stop, num_splits) in enumerate(schedule.work[:, :count].T.tolist()):
        assert slot == slots[row]
        base = int(schedule.row_splits[0, row])
        assert num_splits == schedule.row_splits[1, row]
        assert base + len(found[row]) == i < base + num_splits
        found[row].append((begin, stop))
    for row, length in enumerate(lengths):
        edges = [found[row][0][0], *(stop for _, stop in found[row])]
        assert edges == sorted(edges)
        assert [begin for begin, _ in found[row]] == edges[:-1], "each split begins where the one before it ends"
        assert (edges[0], edges[-1]) == (max(length - (window or length), 0), length)
    tiles = [-(-(stop - begin) // cut_file.BLOCK_N) for begin, stop in schedule.work[2:4, :count].T.tolist()]
    fair = -(-sum(tiles) // (len(starts) - 1))
    assert max(sum(tiles[a:b]) for a, b in pairwise(starts)) <= max(fair * cut_file.SLACK / 8, 1)


@pytest.mark.parametrize(
    ("lengths", "programs", "max_splits", "max_keys"),
    [
        ([1100] * 64, 528, 1, 1100),  # a fair share is 1,067: one more split would not help
        ([1100] * 32, 66, 1, 4 * 1100),
        ([100 + 61 * i % 1900 for i in range(32)], 66, 2, 4352),  # a fair share is 4,138
        ([100 + 61 * i % 1900 for i in range(32)], 528, 5, 576),  # 518
        ([1500] * 64 + [8192], 528, 6, 1664),  # one long among many: 1,578
        ([1024] * 256, 528, 1, 4 * 1024),  # a fair share is 3,972
        ([8192] * 48, 528, 1, 8192),  # those that have none leave their bandwidth to the others
    ],
)
def test_programs_have_about_the_same_work(lengths: list[int], programs: int, max_splits: int, max_keys: int) -> None:
    positions = torch.tensor(lengths, device=DEVICE) - 1
    tables = torch.zeros(1, 1, dtype=torch.int32, device=DEVICE)
    seqs = PagedKVMetadata(torch.arange(len(lengths), device=DEVICE), positions, tables)
    schedule = schedule_split_kv(seqs, 32, 8, 128, ScoreRules(scale=1.0), max(lengths), programs)
    assert int(schedule.row_splits[1].max()) <= max_splits
    begin, stop = schedule.work[2:4].tolist()
    work = [sum(stop[i] - begin[i] for i in range(a, b)) for a, b in pairwise(schedule.starts.tolist())]
    assert max(work) <= max_keys


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "few"), [(4, 2, 16, 99), (3, 1, 24, 99), (9, 2, 16, 0), (2, 1, 512, 0)]
)
@pytest.mark.parametrize(("normed", "rotated"), [("qk", True), ("qkv", True), ("", True), ("", False)])
def test_rope_write_kv(
    heads: int,
    kv_heads: int,
    head_dim: int,
    normed: str,
    rotated: bool,
    few: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rope_file, "_FEW", few)  # one head a program, or several
    seqs = sequences([9, 0, 1, 16], 8, 20)
    rows, width = 4, heads + 2 * kv_heads
    layer = torch.randn(20, 2, kv_heads, 8, head_dim, device=DEVICE).to(dtype)
    qkv = rows_of(rows, width * head_dim, dtype).unflatten(1, (width, head_dim))
    angles = torch.randn(rows, 1, head_dim // 2, device=DEVICE)
    rotation = torch.polar(torch.ones_like(angles), angles) if rotated else None
    weight_dtype = torch.float32 if heads == 3 else dtype
    num_normed = width if normed == "qkv" else heads + kv_heads
    weight = torch.randn(num_normed, head_dim, device=DEVICE).to(weight_dtype) if normed else None
    want_qkv, want = qkv.double(), layer.double()
    exact = rotation.to(torch.complex64) if rotation is not None else None
    rope_write_kv_reference(want_qkv, want, seqs, exact, None if weight is None else weight.double(), 1e-6)
    rope_write_kv(qkv, layer, seqs, rotation, weight, 1e-6)
    assert_close(qkv[:, :heads], want_qkv[:, :heads], dtype)
    if normed != "qkv":
        assert_close(qkv[:, heads + kv_heads :], want_qkv[:, heads + kv_heads :], dtype)
    assert_close(layer, want, dtype)


def test_what_does_not_fit_is_refused() -> None:
    x = torch.randn(2, 8, device=DEVICE)
    with pytest.raises(ValueError, match="do not fit"):
        add_rms_norm(x, None, x[0, :4], 1e-5)
    with pytest.raises(ValueError, match="dtypes differ"):
        add_rms_norm(x, x.half(), x[0], 1e-5)
    for total, message in ((x[:1], "total"), (x.half(), "total"), (torch.zeros(8, 2, device=DEVICE).t(), "contiguous")):
        with pytest.raises(ValueError, match=message):
            add_rms_norm(x, x, x[0], 1e-5, total)
    with pytest.raises(ValueError, match="contiguous"):
        add_rms_norm(x.t(), None, x.t()[0].clone(), 1e-5)
    with pytest.raises(ValueError, match="longer than"):
        wide = torch.zeros(1, norm_file.LONGEST_ROW + 1, device=DEVICE)
        add_rms_norm(wide, None, wide[0], 1e-5)
    for given, message in (
        ({"x": x[:1]}, "does not fit"),
        ({"x": x.half()}, "does not fit"),
        ({"weight": x[0, :4]}, "8 elements"),
        ({"then": [x[0]] * 4}, "more than 3"),
        ({"factor": x[0]}, "factor"),
        ({"x": x.t(), "residual": x.t(), "weight": x[0, :2]}, "contiguous"),
    ):
        with pytest.raises(ValueError, match=message):
            norm_add_norm(**{"residual": x, "x": x, "weight": x[0], "eps": 0.1} | given)
    with pytest.raises(ValueError, match="2 \\* inner"):
        act_mul(x[:, :3])
    with pytest.raises(ValueError, match="contiguous"):
        act_mul(x.t())
    with pytest.raises(ValueError, match="'swish' is none of silu, gelu, "):
        act_mul(x, "swish")
    seqs, rules = sequences([3, 4], 8, 4), ScoreRules(scale=1.0)
    layer, qkv = torch.zeros(4, 2, 2, 8, 16, device=DEVICE), torch.zeros(2, 8, 16, device=DEVICE)
    with pytest.raises(ValueError, match="does not fit a layer"):
        paged_decode(qkv[:, :3], layer, seqs, rules, 8)
    with pytest.raises(ValueError, match="pool's dtype"):
        paged_decode(qkv[:, :4].half(), layer, seqs, rules, 8)
    with pytest.raises(ValueError, match="rows"):
        paged_decode(qkv[:1, :4], layer, seqs, rules, 8)
    with pytest.raises(ValueError, match="int32"):
        paged_decode(qkv[:, :4], layer, PagedKVMetadata(seqs.slots, seqs.positions, seqs.tables.long()), rules, 8)
    with pytest.raises(ValueError, match="rotation"):
        rope_write_kv(qkv, layer, seqs, torch.zeros(2, 1, 4, dtype=torch.complex64, device=DEVICE), None, 1e-6)
    with pytest.raises(ValueError, match="weight"):
        rope_write_kv(qkv, layer, seqs, None, torch.zeros(4, 16, device=DEVICE), 1e-6)
