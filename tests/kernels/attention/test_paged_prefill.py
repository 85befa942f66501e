"""Prefill attention in Triton against its reference in float64: odd sizes, strided rows, poisoned pool and outputs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from blockyard.kernels import gpu_facts
from blockyard.kernels.attention import paged_prefill as file
from blockyard.kernels.attention import prefill_splits as splits_file
from blockyard.kernels.attention.paged_prefill import paged_prefill, paged_prefill_reference
from blockyard.kernels.attention.prefill_hopper import prefill_hopper
from blockyard.kernels.attention.score_rules import ScoreRules
from blockyard.kernels.gpu_facts import runs_hopper_kernels
from blockyard.kernels.kv_cache.paged_kv import PagedKVMetadata

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ERROR = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}  # norm of the difference over the norm
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fills new tensors with NaN, so that unwritten elements are found."""
    torch.manual_seed(int.from_bytes(torch.randint(256, (4,)).numpy().tobytes()[:1]))

    def empty(*args: Any, **kwargs: Any) -> Tensor:
        return torch.full(*args, float("nan"), **kwargs)

    class Torch:
        def __getattr__(self, name: str) -> Any:
            return empty if name == "empty" else getattr(torch, name)

    for module in (file, splits_file):
        monkeypatch.setattr(module, "torch", Torch())


class Case:
    """Decodes first, in rows of their own, then sequences of (known before, new tokens); a known of -1: no slot."""

    def __init__(
        self,
        seqs: list[tuple[int, int]],
        heads: int,
        kv_heads: int,
        head_dim: int,
        block_size: int,
        decodes: int = 0,
        rest: float = float("nan"),
    ) -> None:
        """`rest` is the value of pool rows without a token."""
        num_blocks, width = 160, 40
        counts = torch.tensor([1] * decodes + [n for _, n in seqs])
        befores = [3] * decodes + [known for known, _ in seqs]
        order = torch.randperm(len(counts) + 2)[: len(counts)]
        free = torch.randperm(num_blocks).tolist()
        tables = torch.full((len(counts) + 2, width), 2**30, dtype=torch.int32)  # must not be read
        self.layer = torch.full((num_blocks, 2, kv_heads, block_size, head_dim), rest)
        positions = []
        for i, before in enumerate(befores):
            length = max(before, 0) + int(counts[i])
            positions += range(max(before, 0), length)
            if before < 0:
                order[i] = -1
                continue
            used = -(-length // block_size)
            mine, free = free[:used], free[used:]
            tables[order[i], :used] = torch.tensor(mine, dtype=torch.int32)
            for p in range(length):
                self.layer[mine[p // block_size], :, :, p % block_size] = torch.randn(2, kv_heads, head_dim)
        self.seqs = PagedKVMetadata(
            order.repeat_interleave(counts).to(DEVICE), torch.tensor(positions).to(DEVICE), tables.to(DEVICE)
        )
        starts = torch.cat((torch.zeros(1), counts.cumsum(0)))[decodes:]
        self.starts = starts.int().to(DEVICE)
        self.layer = self.layer.to(DEVICE)
        self.q = torch.randn(int(counts.sum()), (heads + 3) * head_dim + 2, device=DEVICE)
        self.shape = (heads, head_dim)

    def run(
        self,
        dtype: torch.dtype,
        window: int | None,
        soft_cap: float | None = None,
        longest: int = 400,
        chunked: bool = False,
        has_sinks: bool = False,
        kernel: Callable[..., None] = paged_prefill,
    ) -> None:
        heads, head_dim = self.shape
        rows, layer = len(self.q), self.layer.to(dtype)
        q = self.q.to(dtype)[:, : (heads + 3) * head_dim].view(rows, heads + 3, head_dim)[:, :heads]
        prefills = rows - int(self.starts[0])
        out = torch.full((prefills, heads * head_dim), float("nan"), dtype=dtype, device=DEVICE)
        sinks = torch.linspace(-3, 3, heads, device=DEVICE) if has_sinks else None
        rules = ScoreRules(scale=0.2, window=window, chunked=chunked, soft_cap=soft_cap, sinks=sinks)
        kernel(q, layer, self.seqs, self.starts, rules, longest, out)
        want = paged_prefill_reference(q.double(), layer.double(), self.seqs, self.starts, rules)
        assert not out.isnan().any()
        error = float((out.double() - want).norm() / want.norm().clamp_min(1e-12))
        assert error <= ERROR[dtype], f"relative error {error}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("seqs", "heads", "kv_heads", "head_dim", "block_size", "window"),
    [
        ([(0, 70), (0, 3)], 4, 2, 16, 8, None),
        ([(65, 2), (-1, 5), (33, 40), (0, 1)], 3, 1, 24, 16, None),  # cached prefixes, one of no slot
        ([(100, 30), (10, 60)], 4, 4, 16, 8, 20),
        ([(0, 130)], 2, 1, 32, 5, 64),
        ([(0, 20), (30, 9)], 2, 2, 200, 16, None),
        ([(0, 20), (60, 9)], 4, 2, 512, 16, None),
        ([(40, 30)], 2, 1, 320, 16, 20),
        ([(-1, 4)], 2, 2, 16, 8, None),
        ([(0, 1)] * 35, 5, 1, 16, 16, None),  # more sequences than are loaded at once
    ],
)
def test_paged_prefill(
    seqs: list[tuple[int, int]],
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    window: int | None,
    dtype: torch.dtype,
) -> None:
    Case(seqs, heads, kv_heads, head_dim, block_size).run(dtype, window)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("seqs", "chunk"),
    [
        ([(0, 150), (30, 40)], 64),  # query tiles on both sides of a border, and chunks of whole key tiles
        ([(63, 3), (64, 2), (0, 7), (130, 5)], 64),
        ([(100, 30), (10, 60), (-1, 3)], 20),  # borders inside of key tiles
        ([(0, 90)], 200),
    ],
)
def test_tokens_attend_within_their_chunk(seqs: list[tuple[int, int]], chunk: int, dtype: torch.dtype) -> None:
    Case(seqs, 4, 2, 16, 8).run(dtype, chunk, chunked=True)


def test_the_reference_of_chunks() -> None:
    """A token's output is that of a sequence which begins at its chunk."""
    case = Case([(0, 30)], 2, 1, 16, 4)
    q, layer = case.q[:, :32].view(30, 2, 16), case.layer.nan_to_num()
    got = paged_prefill_reference(q, layer, case.seqs, case.starts, ScoreRules(scale=0.2, window=12, chunked=True))
    table = case.seqs.tables[case.seqs.slots[0]]
    for begin, end in ((0, 12), (12, 24), (24, 30)):
        shifted = PagedKVMetadata(
            torch.zeros(end - begin, dtype=torch.int64, device=DEVICE),
            torch.arange(end - begin, device=DEVICE),
            table[None, begin // 4 :],
        )
        starts = torch.tensor([0, end - begin], device=DEVICE)
        alone = paged_prefill_reference(q[begin:end], layer, shifted, starts, ScoreRules(scale=0.2))
        torch.testing.assert_close(got[begin:end], alone)


def test_rows_of_decodes_come_first_and_are_left_alone() -> None:
    Case([(20, 7), (0, 90)], 4, 2, 16, 8, decodes=5).run(torch.float32, None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 9, 150])
def test_scores_are_capped(window: int | None, dtype: torch.dtype) -> None:
    Case([(40, 33)], 4, 2, 16, 8).run(dtype, window, soft_cap=0.5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 9])
def test_sinks(window: int | None, dtype: torch.dtype) -> None:
    Case([(40, 33), (-1, 5), (0, 3)], 6, 2, 16, 8).run(dtype, window, has_sinks=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("window", "chunked", "has_sinks"),
    [(None, False, False), (60, False, False), (90, True, False), (None, False, True), (60, False, True)],
)
def test_tiles_are_shared(
    window: int | None, chunked: bool, has_sinks: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = []
    kernel = splits_file.combine_prefill_kernel

    class Combine:
        def __getitem__(self, grid: tuple[int]) -> Any:
            ran.append(grid)
            return kernel[grid]

    monkeypatch.setattr(splits_file, "combine_prefill_kernel", Combine())
    monkeypatch.setattr(splits_file, "_MAX_SPLITS", 4)
    monkeypatch.setattr(splits_file, "SPLIT_MIN_LEN", 60)
    monkeypatch.setattr(splits_file, "_COMBINE_US", 0.0)
    Case([(200, 6), (3, 2)], 4, 2, 16, 16).run(dtype, window, chunked=chunked, has_sinks=has_sinks)
    assert ran == [(32,)]


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size"), [(8, 2, 128, 16), (6, 2, 64, 32), (8, 4, 256, 16)]
)
@pytest.mark.parametrize(
    ("window", "soft_cap", "has_sinks"),
    [(None, None, False), (9, None, False), (150, None, True), (None, 0.5, False), (300, 0.5, True)],
)
@pytest.mark.parametrize("longest", [640, 20_000])  # keys are shared by programs where sequences may be long
def test_hopper(
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    window: int | None,
    soft_cap: float | None,
    has_sinks: bool,
    longest: int,
) -> None:
    if not runs_hopper_kernels(torch.device(DEVICE)):
        pytest.skip("another kind of GPU")
    seqs = [(0, 300), (400, 150), (-1, 40), (0, 1), (0, 0), (77, 2), *[(0, 3)] * 40]
    case = Case(seqs, heads, kv_heads, head_dim, block_size, decodes=3, rest=50.0)
    case.run(torch.bfloat16, window, soft_cap, longest, has_sinks=has_sinks, kernel=prefill_hopper)


def test_hopper_kernels_are_for_triton_versions_that_compile_them(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    monkeypatch.setattr(gpu_facts, "compute_capability", lambda device: (9, 0))
    assert gpu_facts.runs_hopper_kernels(cuda) == hasattr(gl, "thread_barrier")
    monkeypatch.setattr(gpu_facts, "_GLUON_HAS_NAMES", False)
    assert not gpu_facts.runs_hopper_kernels(cuda)
    monkeypatch.setattr(gpu_facts, "_GLUON_HAS_NAMES", True)
    assert gpu_facts.runs_hopper_kernels(cuda) and not gpu_facts.runs_hopper_kernels(torch.device("cpu"))
    monkeypatch.setattr(gpu_facts, "compute_capability", lambda device: (10, 0))
    assert not gpu_facts.runs_hopper_kernels(cuda)


@pytest.mark.parametrize(
    ("rows", "longest", "splits"),
    [
        (32, 16_512, 16),  # 8 programs: splits occupy all SMs
        (128, 16_512, 4),
        (128, 131_072, 4),
        (256, 16_512, 2),
        (512, 16_512, 1),
        (640, 16_512, 4),  # two rounds for whole sequences, five for quarters
        (128, 1_000, 1),
        (2048, 32_000, 1),  # four rounds, and nearly full ones
        (8192, 8192, 1),
        (32_768, 32_768, 1),  # combining would cost more than a split saves
    ],
)
def test_splits_by_work(rows: int, longest: int, splits: int) -> None:
    heads, group, head_dim = 32, 4, 128
    programs = -(-rows * group // 128) * heads // group
    assert splits_file.num_splits(programs, longest, 132, 0.0125, rows * heads * head_dim) == splits


def test_what_does_not_fit_is_refused() -> None:
    case = Case([(0, 4)], 2, 1, 16, 8)
    q, layer, out = case.q[:, :32].view(4, 2, 16), case.layer, torch.zeros(4, 32, device=DEVICE)

    def run(**changed: Any) -> None:
        paged_prefill(
            **{
                "q": q,
                "layer": layer,
                "metadata": case.seqs,
                "query_start_loc": case.starts,
                "rules": ScoreRules(scale=1.0),
                "max_seq_len": 8,
                "out": out,
            }
            | changed
        )

    for changed, message in (
        ({"q": q[:, :, :8]}, "does not fit a layer"),
        ({"q": q.half()}, "pool's dtype"),
        ({"query_start_loc": case.starts.long()}, "int32"),
        ({"out": out[:, :16]}, "out"),
        ({"q": q[:2]}, "for 2 rows"),
    ):
        with pytest.raises(ValueError, match=message):
            run(**changed)
