"""The fused kernel of latent decode against its reference in float64, and what it leaves in the cache."""

import pytest
import torch
from torch import Tensor

from blockyard.kernels.attention.fused_decode import SplitSemaphores
from blockyard.kernels.attention.latent.fused_latent_decode import (
    FusedLatentConfig,
    fused_latent_decode,
    fused_latent_decode_reference,
)
from blockyard.kernels.kv_cache.paged_kv import PagedKVMetadata

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ERROR = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}  # norm of the difference over the norm
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]
BLOCK_SIZE, NUM_BLOCKS, SCALE, EPS = 16, 24, 0.2, 1e-6
SMALL = FusedLatentConfig(min_keys=16, keys=2, warps=4, up_rows=16)


class Case:
    """Sequences of these lengths with the row that the step adds; 0 is padding. Only older rows are in the cache."""

    def __init__(
        self,
        lengths: list[int],
        heads: int = 3,
        plain: int = 12,
        rotated: int = 8,
        value: int = 20,
        latent: int = 24,
        dtype: torch.dtype = torch.float32,
        cache: torch.dtype | None = None,
        rotates: bool = True,
    ) -> None:
        torch.manual_seed(len(lengths) + heads + latent)
        width = -(-max(lengths) // BLOCK_SIZE)
        tables = torch.randperm(NUM_BLOCKS)[: len(lengths) * width].view(len(lengths), width).int()
        slots = torch.tensor([row if length else -1 for row, length in enumerate(lengths)])
        positions = torch.tensor([max(length - 1, 0) for length in lengths])
        self.metadata = PagedKVMetadata(slots.to(DEVICE), positions.to(DEVICE), tables.to(DEVICE))
        self.scales = None if cache is None else torch.tensor([0.02, 1.0], device=DEVICE)
        self.layer = torch.zeros(NUM_BLOCKS, 1, 1, BLOCK_SIZE, latent + rotated)
        for row, length in enumerate(lengths):
            for i in range(max(length - 1, 0)):
                self.layer[int(tables[row, i // BLOCK_SIZE]), 0, 0, i % BLOCK_SIZE] = torch.randn(latent + rotated)
        if self.scales is not None:
            self.layer /= 0.02
        self.layer = self.layer.to(DEVICE, cache or dtype)
        # products leave a query and its row side by side
        both = torch.randn(len(lengths), heads * (plain + rotated) + latent + rotated, device=DEVICE).to(dtype)
        self.query = both[:, : heads * (plain + rotated)].view(len(lengths), heads, plain + rotated)
        self.rows = both[:, heads * (plain + rotated) :]
        angles = torch.rand(len(lengths), 1, rotated // 2) * 6
        self.rotation = torch.polar(torch.ones_like(angles), angles).to(DEVICE) if rotates else None
        self.weight = torch.rand(latent, device=DEVICE) + 0.5
        self.up = (torch.randn(heads, plain + value, latent, device=DEVICE) / latent**0.5).to(dtype)
        self.max_seq_len, self.heads = max(lengths), heads
        self.semaphores = SplitSemaphores(len(lengths) * heads, torch.device(DEVICE))

    def run(self, config: FusedLatentConfig | None = SMALL) -> Tensor:
        return fused_latent_decode(
            self.query,
            self.rows,
            self.layer,
            self.metadata,
            self.rotation,
            self.weight,
            EPS,
            self.up,
            SCALE,
            self.max_seq_len,
            self.semaphores,
            self.scales,
            config,
        )

    def reference(self) -> tuple[Tensor, Tensor]:
        """In float64 but for the cache, whose dtype new rows are rounded to: the result and the cache."""
        rotation = None if self.rotation is None else self.rotation.to(torch.complex128)
        layer = self.layer.clone() if self.scales is not None else self.layer.double()
        query, rows, weight, up = (one.double().clone() for one in (self.query, self.rows, self.weight, self.up))
        out = fused_latent_decode_reference(
            query, rows, layer, self.metadata, rotation, weight, EPS, up, SCALE, self.scales
        )
        return out, layer


def assert_close(got: Tensor, want: Tensor, error: float) -> None:
    assert got.shape == want.shape and not got.isnan().any()
    found = float((got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-12))
    assert found <= error, f"relative error {found}"


def check(case: Case, error: float, config: FusedLatentConfig | None = SMALL) -> None:
    want, cache = case.reference()
    query, rows = case.query.clone(), case.rows.clone()
    got = case.run(config)
    assert torch.equal(case.query, query) and torch.equal(case.rows, rows)
    assert_close(got, want, error)
    assert_close(case.layer.float(), cache.float(), error)
    assert not case.semaphores.counts.any(), "the next kernel counts from 0"
    assert torch.equal(case.run(config), got), "the same again, after the new row is in the cache"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", [[1], [2], [17], [70], [100]])
def test_one_row(lengths: list[int], dtype: torch.dtype) -> None:
    check(Case(lengths, dtype=dtype), ERROR[dtype])


def test_rows_of_different_lengths_and_padding() -> None:
    case = Case([33, 0, 1, 64])
    check(case, ERROR[torch.float32])
    assert not case.run()[1].any(), "padding rows are zeros"


@pytest.mark.parametrize(
    "sizes",
    [
        {"heads": 2, "plain": 40, "rotated": 16, "value": 36, "latent": 64},  # several parts of both matrices
        {"heads": 1, "plain": 5, "rotated": 2, "value": 3, "latent": 10},
        {"rotates": False},
    ],
)
def test_other_sizes(sizes: dict[str, int]) -> None:
    check(Case([50], **sizes), ERROR[torch.float32])


@pytest.mark.parametrize("cache", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_cache_in_8_bits(cache: torch.dtype) -> None:
    check(Case([45], cache=cache), 1e-3)


def test_one_split_takes_several_tiles() -> None:
    check(Case([90]), ERROR[torch.float32], FusedLatentConfig(min_keys=128, keys=2, warps=4, up_rows=16))


def test_no_rows() -> None:
    case = Case([5])
    case.query, case.rows, case.rotation = case.query[:0], case.rows[:0], None
    case.metadata = PagedKVMetadata(case.metadata.slots[:0], case.metadata.positions[:0], case.metadata.tables)
    assert case.run().shape == (0, 60)


def test_what_does_not_fit_is_refused() -> None:
    case = Case([5])
    good = dict(vars(case))
    for name, wrong, match in (
        ("rows", case.rows.half(), "rows"),
        ("up", case.up[:, :, :-1], "up"),
        ("up", case.up.transpose(1, 2).contiguous().transpose(1, 2), "up"),
        ("layer", case.layer[..., :-1], "layer"),
        ("query", case.query.transpose(0, 1).contiguous().transpose(0, 1)[..., ::2], "query|contiguous|up"),
        ("rotation", torch.ones(1, 1, 3, dtype=torch.complex64, device=DEVICE), "rotation"),
        ("semaphores", SplitSemaphores(1, torch.device(DEVICE)), "1 counts for 1 rows of 3 heads"),
    ):
        vars(case).update(good | {name: wrong})
        with pytest.raises(ValueError, match=match):
            case.run()
