"""The compiled decode step against its float64 reference."""

import ctypes
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from blockyard.kernels.compile_cpp import Library, cache_folder, find_compiler
from blockyard.kernels.decode_step import (
    PANEL,
    SOURCE,
    DecoderWeights,
    DecodeStep,
    LayerWeights,
    Rows,
    Weight,
    decode_step_reference,
    size_bytes,
    to_panels,
    why_not,
)

CLOSE = {torch.float32: 2e-5, torch.bfloat16: 2e-3}  # K and V are rounded on their way, to one side or the other


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    compiler = find_compiler()
    if compiler is None:
        pytest.skip("no C++ compiler")
    made = Library(SOURCE, cache_folder(), compiler)
    made.start()
    loaded = made.wait()
    assert loaded is not None, made.problem
    return loaded


def decoder(
    dtype: torch.dtype,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    hidden: int = 48,
    inner: int = 70,
    vocab: int = 101,
    bias: bool = False,
    qk_norm: bool = False,
    windows: tuple[int | None, ...] = (None, None),
) -> DecoderWeights:
    def numbers(*size: int) -> Tensor:
        return (torch.randn(size) / size[-1] ** 0.5).to(dtype)

    def weight(out_features: int, in_features: int) -> Weight:
        return Weight(numbers(out_features, in_features), numbers(out_features) if bias else None)

    layers = [
        LayerWeights(
            norm1=(torch.rand(hidden) + 0.5).to(dtype),
            qkv=weight((heads + 2 * kv_heads) * head_dim, hidden),
            qk_norm=(torch.rand(heads + kv_heads, head_dim) + 0.5).to(dtype) if qk_norm else None,
            out=weight(hidden, heads * head_dim),
            norm2=(torch.rand(hidden) + 0.5).to(dtype),
            gate_up=weight(2 * inner, hidden),
            down=weight(hidden, inner),
            window=window,
        )
        for window in windows
    ]
    embedding = torch.randn(vocab, hidden).to(dtype)
    norm, head = (torch.rand(hidden) + 0.5).to(dtype), Weight(numbers(vocab, hidden))
    return DecoderWeights(heads, kv_heads, head_dim, 1e-6, head_dim**-0.5, embedding, layers, norm, head)


def run(library: ctypes.CDLL, weights: DecoderWeights, rows: int, size: int = 16, longest: int = 90, threads: int = 1):
    """Errors of hidden rows and logits as shares of their lengths, and both pools."""
    positions = torch.randint(0, longest, (rows,))
    positions[0] = longest - 1
    width = -(-longest // size)
    tables = torch.randperm(rows * width + 3)[: rows * width].view(rows, width)
    dtype = weights.norm.dtype
    pool = torch.randn(len(weights.layers), rows * width + 3, 2, weights.kv_heads, size, weights.head_dim).to(dtype)
    for row in range(rows):  # what lies behind a sequence is never read
        places = torch.arange(width * size).view(width, size) > positions[row]
        pool[:, tables[row]] = pool[:, tables[row]].masked_fill(places[None, :, None, None, :, None], torch.nan)
    angles = torch.rand(longest, 1, weights.head_dim // 2) * 6
    rotations = torch.polar(torch.ones_like(angles), angles)
    step, own = DecodeStep(weights), pool.clone()
    step.bind(library, list(own), rotations, threads)
    batch = Rows(torch.randint(0, len(weights.embedding), (rows,)), positions, tables)
    logits = torch.full((rows, len(weights.head.matrix)), torch.nan)
    found = step(batch, logits), logits
    expected = decode_step_reference(weights, list(pool), rotations, batch)
    errors = [float(((a - b).norm(dim=-1) / b.norm(dim=-1)).max()) for a, b in zip(found, expected, strict=True)]
    return errors, own, pool


def check(library: ctypes.CDLL, weights: DecoderWeights, **how: int) -> None:
    errors, own, pool = run(library, weights, **how)
    close = CLOSE[weights.norm.dtype]
    assert max(errors) < close
    assert torch.allclose(own.float(), pool.float(), rtol=8 * close, atol=close, equal_nan=True)


@pytest.mark.parametrize("dtype", list(CLOSE))
@pytest.mark.parametrize("rows", [1, 2, 3, 8, 17])
def test_rows(library: ctypes.CDLL, dtype: torch.dtype, rows: int) -> None:
    check(library, decoder(dtype), rows=rows)


@pytest.mark.parametrize("dtype", list(CLOSE))
@pytest.mark.parametrize("threads", [2, 3])
def test_threads_share_a_step(library: ctypes.CDLL, dtype: torch.dtype, threads: int) -> None:
    check(library, decoder(dtype), rows=5, threads=threads)


@pytest.mark.parametrize("dtype", list(CLOSE))
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(1, 1, 64), (3, 1, 32), (7, 1, 96), (8, 1, 128), (6, 3, 32)]
)
def test_heads(library: ctypes.CDLL, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int) -> None:
    check(library, decoder(dtype, heads, kv_heads, head_dim), rows=4)


@pytest.mark.parametrize("dtype", list(CLOSE))
def test_biases_norms_of_heads_and_windows(library: ctypes.CDLL, dtype: torch.dtype) -> None:
    check(library, decoder(dtype, bias=True, qk_norm=True, windows=(20, None, 1)), rows=6)


@pytest.mark.parametrize("dtype", list(CLOSE))
@pytest.mark.parametrize(("size", "longest"), [(1, 20), (5, 33), (8, 1), (24, 100), (64, 700)])
def test_sizes_of_blocks(library: ctypes.CDLL, dtype: torch.dtype, size: int, longest: int) -> None:
    check(library, decoder(dtype, windows=(None, 9)), rows=3, size=size, longest=longest)


@pytest.mark.parametrize(("hidden", "inner", "vocab"), [(16, 1, 1), (64, 32, 64), (80, 33, 31)])
def test_odd_sizes(library: ctypes.CDLL, hidden: int, inner: int, vocab: int) -> None:
    check(library, decoder(torch.float32, hidden=hidden, inner=inner, vocab=vocab), rows=9)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", list(CLOSE))
def test_tokens_of_one_sequence_see_those_before_them(library: ctypes.CDLL, dtype: torch.dtype, threads: int) -> None:
    weights, num = decoder(dtype, windows=(None, 7)), 21
    ids, tables = torch.randint(0, 101, (num,)), torch.tensor([[3, 0, 1]])
    pool = torch.zeros(2, 4, 2, 2, 8, 32).to(dtype)
    angles = torch.rand(num, 1, 16) * 6
    rotations = torch.polar(torch.ones_like(angles), angles)
    step, own = DecodeStep(weights), pool.clone()
    step.bind(library, list(own), rotations, threads)
    found = step(Rows(ids, torch.arange(num), tables.expand(num, 3).contiguous()))
    for i in range(num):
        row = Rows(ids[i : i + 1], torch.tensor([i]), tables)
        expected, _ = decode_step_reference(weights, list(pool), rotations, row)
        assert (found[i] - expected).norm() < 2 * CLOSE[dtype] * expected.norm()


def test_a_token_that_is_not_finite_spoils_its_row_alone(library: ctypes.CDLL) -> None:
    weights = decoder(torch.float32)
    weights.embedding[7] = torch.nan
    step, pool = DecodeStep(weights), torch.zeros(2, 4, 2, 2, 16, 32)
    step.bind(library, list(pool), None, 1)
    logits = torch.empty(3, 101)
    step(Rows(torch.tensor([3, 7, 5]), torch.tensor([0, 5, 17]), torch.tensor([[0, 0], [1, 1], [2, 3]])), logits)
    assert torch.isfinite(logits).all(-1).tolist() == [True, False, True]


def test_panels_hold_every_weight_once() -> None:
    for dtype in CLOSE:
        matrix = torch.arange(1, 41, dtype=dtype)[:, None].expand(40, 3)
        panels = to_panels(matrix)
        assert panels.numel() == 2 * PANEL * 3
        assert sorted(panels.flatten().unique().tolist()) == list(range(41))


def test_what_has_no_kernel_is_said() -> None:
    assert why_not(decoder(torch.float32)) == ""
    assert "float16" in why_not(decoder(torch.float16))
    assert "24" in why_not(decoder(torch.bfloat16, head_dim=24))
    assert "40" in why_not(decoder(torch.float32, hidden=40))
    with pytest.raises(ValueError, match="float16"):
        DecodeStep(decoder(torch.float16))


def test_wrong_tensors_are_refused(library: ctypes.CDLL) -> None:
    step = DecodeStep(decoder(torch.float32))
    with pytest.raises(ValueError, match="bfloat16"):
        step.bind(library, list(torch.zeros(2, 4, 2, 2, 16, 32, dtype=torch.bfloat16)), None, 1)
    step.bind(library, list(torch.zeros(2, 4, 2, 2, 16, 32)), None, 1)
    rows = Rows(torch.tensor([1]), torch.tensor([0]), torch.tensor([[2]]))
    with pytest.raises(ValueError, match="int32"):
        step(replace(rows, positions=torch.tensor([0], dtype=torch.int32)))
    with pytest.raises(ValueError, match=r"\(1, 100\)"):
        step(rows, torch.empty(1, 100))
    with pytest.raises(ValueError, match=r"\(2,\)"):
        step(replace(rows, token_ids=torch.tensor([1, 2])))


def test_size_is_that_of_the_matrices() -> None:
    weights = decoder(torch.bfloat16, windows=(None,))
    assert size_bytes(weights) == 2 * ((8 * 32 + 140) * 48 + 48 * (4 * 32 + 70) + 101 * 48)
