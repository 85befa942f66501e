"""The decode kernels of latent attention against their reference in float64."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from blockyard.kernels.attention import batch_invariant as invariant_file
from blockyard.kernels.attention.latent import latent_decode as file
from blockyard.kernels.attention.latent.decode_hopper import latent_decode_hopper
from blockyard.kernels.attention.latent.latent_decode import (
    latent_decode,
    latent_decode_reference,
    schedule_latent_decode,
)
from blockyard.kernels.attention.latent.latent_invariant import latent_invariant
from blockyard.kernels.attention.score_rules import ScoreRules
from blockyard.kernels.gpu_facts import runs_hopper_kernels
from blockyard.kernels.kv_cache.kv_types import FP8_MAX
from blockyard.kernels.kv_cache.paged_kv import PagedKVMetadata

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ERROR = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}  # norm of the difference over the norm
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]


def sequences(lengths: list[int], block_size: int, num_blocks: int) -> PagedKVMetadata:
    """Sequences in blocks in random order; a length of 0 is a padding row."""
    width = -(-max([*lengths, 1]) // block_size)
    tables = torch.randperm(num_blocks)[: len(lengths) * width].view(len(lengths), width).int()
    slots = [row if length else -1 for row, length in enumerate(lengths)]
    positions = [max(length - 1, 0) for length in lengths]
    return PagedKVMetadata(
        torch.tensor(slots, dtype=torch.int64, device=DEVICE),
        torch.tensor(positions, dtype=torch.int64, device=DEVICE),
        tables.to(DEVICE),
    )


def layer_of(seqs: PagedKVMetadata, num_blocks: int, block_size: int, row_dim: int) -> Tensor:
    """A layer of the cache with NaN where no sequence has a token."""
    layer = torch.full((num_blocks, 1, 1, block_size, row_dim), float("nan"))
    for slot, position in zip(seqs.slots.tolist(), seqs.positions.tolist(), strict=True):
        for i in range(position + 1) if slot >= 0 else ():
            layer[int(seqs.tables[slot, i // block_size]), 0, 0, i % block_size] = torch.randn(row_dim)
    return layer.to(DEVICE)


def assert_close(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    assert got.shape == want.shape and not got.isnan().any()
    error = float((got.double() - want).norm() / want.norm().clamp_min(1e-12))
    assert error <= ERROR[dtype], f"relative error {error}"


def queries(rows: int, heads: int, latent_dim: int, rotated: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Heads before rows in one, and rows with other numbers between them in the other, as products leave them."""
    q_latent = torch.randn(heads, rows, latent_dim, device=DEVICE).to(dtype).transpose(0, 1)
    return q_latent, torch.randn(rows, heads + 1, 7 + rotated, device=DEVICE).to(dtype)[:, :heads, 7:]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("lengths", "heads", "latent_dim", "rotated", "block_size"),
    [
        ([1, 65, 0, 17], 4, 24, 8, 8),
        ([300, 7], 16, 32, 16, 16),  # several splits
        ([130, 20], 70, 16, 6, 5),  # several tiles of heads
        ([70], 3, 128, 64, 16),
        ([0, 0], 4, 24, 8, 8),
        ([], 4, 24, 8, 8),
    ],
)
def test_latent_decode(
    lengths: list[int], heads: int, latent_dim: int, rotated: int, block_size: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    seqs = sequences(lengths, block_size, 60)
    layer = layer_of(seqs, 60, block_size, latent_dim + rotated).to(dtype)
    q = queries(len(lengths), heads, latent_dim, rotated, dtype)
    want = latent_decode_reference(q[0].double(), q[1].double(), layer.double(), seqs, ScoreRules(scale=0.2))
    out = torch.full((len(lengths), heads, latent_dim), float("nan"), dtype=dtype, device=DEVICE)
    assert_close(latent_decode(*q, layer, seqs, ScoreRules(scale=0.2), 400, out), want, dtype)
    assert all(not out[row].any() for row, length in enumerate(lengths) if not length)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_schedule_serves_all_layers(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file, "num_multiprocessors", lambda device: 8)
    seqs, q = sequences([260, 0, 70], 16, 60), queries(3, 20, 24, 8, dtype)
    layer = layer_of(seqs, 60, 16, 32).to(dtype)
    schedule = schedule_latent_decode(q[0], seqs, ScoreRules(scale=0.3), 300)
    assert int(schedule.row_splits[1, 0]) > 1
    for _ in range(2):
        layer = layer_of(seqs, 60, 16, 32).to(dtype)
        want = latent_decode_reference(q[0].double(), q[1].double(), layer.double(), seqs, ScoreRules(scale=0.3))
        assert_close(latent_decode(*q, layer, seqs, ScoreRules(scale=0.3), 300, schedule=schedule), want, dtype)


@pytest.mark.parametrize(("dims", "programs"), [(8, 1024), (32, 1024), (32, 7), (8, 1)])
def test_splits_are_combined_in_parts_of_a_head_or_several_heads_at_a_time(
    dims: int, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file, "_COMBINE_PROGRAMS", programs)
    monkeypatch.setattr(file, "num_multiprocessors", lambda device: 8)
    monkeypatch.setattr(file, "_FEW_ROWS_SPLITS", 4)
    monkeypatch.setattr(file, "_FEW_ROWS_DIMS", dims)
    torch.manual_seed(1)
    seqs, q = sequences([420, 0, 70], 16, 90), queries(3, 5, 24, 8, torch.float32)
    layer = layer_of(seqs, 90, 16, 32)
    want = latent_decode_reference(q[0].double(), q[1].double(), layer.double(), seqs, ScoreRules(scale=0.3))
    assert_close(latent_decode(*q, layer, seqs, ScoreRules(scale=0.3), 500), want, torch.float32)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize("heads", [16, 20, 64, 128])
@pytest.mark.parametrize("lengths", [[1], [63, 64, 65, 0, 129], [5000], [0, 0], [700] * 150, [100, 3000, 1] * 30])
def test_hopper(lengths: list[int], heads: int, block_size: int) -> None:
    torch.manual_seed(len(lengths))
    num_blocks = len(lengths) * -(-max(*lengths, 1) // block_size)
    seqs, q = sequences(lengths, block_size, num_blocks), queries(len(lengths), heads, 512, 64, torch.bfloat16)
    layer = torch.randn(num_blocks, 1, 1, block_size, 576, device=DEVICE).bfloat16()
    if not runs_hopper_kernels(torch.device(DEVICE)):
        pytest.skip("another kind of GPU")
    rules = ScoreRules(scale=0.1)
    want = latent_decode_reference(q[0].double(), q[1].double(), layer.double(), seqs, rules)
    out = torch.full((len(lengths), heads, 512), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    assert_close(latent_decode_hopper(*q, layer, seqs, rules, 6000, out), want, torch.bfloat16)
    assert all(not out[row].any() for row, length in enumerate(lengths) if not length)
    assert torch.equal(latent_decode_hopper(*q, layer, seqs, rules, 6000), out)


@pytest.mark.parametrize("kv_dtype", FP8_MAX)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_in_8_bits(dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    seqs, q, scales = sequences([140, 0, 20], 16, 60), queries(3, 5, 24, 8, dtype), torch.full((2,), 0.03).to(DEVICE)
    layer = (layer_of(seqs, 60, 16, 32).nan_to_num() / 0.03).to(kv_dtype)
    rules = ScoreRules(scale=0.3, kv_scales=scales)
    want = latent_decode_reference(q[0].double(), q[1].double(), layer, seqs, rules)
    assert_close(latent_decode(*q, layer, seqs, rules, 200), want, dtype)
    for is_decode in (True, False):
        assert_close(latent_invariant(*q, layer, seqs, rules, 200, is_decode), want, dtype)


def test_only_queries_of_16_bits_pass_the_assembly_for_8_bit_rows() -> None:
    """Another size does not compile, and the compiler ends its process."""
    scales = torch.ones(1)
    sizes = {dtype: SimpleNamespace(is_cuda=True, dtype=dtype) for dtype in DTYPES}
    assert [file.converts_once(q, scales) for q in sizes.values()] == [dtype.itemsize == 2 for dtype in sizes]
    assert not any(file.converts_once(q, None) for q in sizes.values())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_any_batch(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decodes, prefills, alone and among others."""
    monkeypatch.setattr(invariant_file, "_MIN_SPLIT_LEN", 32)
    torch.manual_seed(3)
    seqs, q = sequences([150, 0, 64, 9], 16, 60), queries(4, 20, 24, 8, dtype)
    layer = layer_of(seqs, 60, 16, 32).to(dtype)
    want = latent_decode_reference(q[0].double(), q[1].double(), layer.double(), seqs, ScoreRules(scale=0.3))
    all_rows = latent_invariant(*q, layer, seqs, ScoreRules(scale=0.3), 300, is_decode=True)
    assert_close(all_rows, want, dtype)
    assert torch.equal(latent_invariant(*q, layer, seqs, ScoreRules(scale=0.3), 300, is_decode=False), all_rows)
    for row in range(4):
        one = slice(row, row + 1)
        alone = PagedKVMetadata(seqs.slots[one], seqs.positions[one], seqs.tables)
        got = latent_invariant(q[0][one], q[1][one], layer, alone, ScoreRules(scale=0.3), 300, is_decode=row % 2 == 0)
        assert torch.equal(got[0], all_rows[row])


def test_inputs_that_do_not_fit() -> None:
    seqs, q = sequences([3], 8, 4), queries(1, 4, 24, 8, torch.float32)
    layer, rules = layer_of(seqs, 4, 8, 32), ScoreRules(scale=1.0)
    with pytest.raises(ValueError, match="do not fit a layer"):
        latent_decode(*q, layer.expand(4, 2, 1, 8, 32), seqs, rules, 8)
    with pytest.raises(ValueError, match="q_rotated"):
        latent_decode(q[0], q[1][:, :2], layer, seqs, rules, 8)
    with pytest.raises(ValueError, match="expected q of the pool's dtype"):
        latent_decode(*q, layer.half(), seqs, rules, 8)
    with pytest.raises(ValueError, match="must be contiguous"):
        latent_decode(q[0].mT.contiguous().mT, q[1], layer, seqs, rules, 8)
