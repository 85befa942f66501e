"""Products of adapters against the reference: mixed ranks, parts without matrices, rows without adapters."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from adapter_tables import DEVICE, DTYPES, ERROR, in_places, make_table
from compile_for_hopper import SHARED, shared_bytes

from blockyard.kernels.layers.rms_norm import RMSNorm
from blockyard.kernels.lora import add_adapters as file
from blockyard.kernels.lora.adapter_table import AdapterTable, add_adapters_reference
from blockyard.kernels.lora.adapter_tiles import tile_rows
from blockyard.kernels.lora.add_adapters import add_adapters, start_adapters


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("ranks", "sizes", "inputs", "places"),
    [
        ([[16]], [64], 64, [0]),
        ([[16]], [64], 64, [-1]),
        ([[1, 3, 17], [40, 0, 5], [0, 0, 0]], [48, 16, 16], 72, [0, 2, -1, 1, 1, 0]),
        ([[7], [64]], [300], 513, [1, -1, 0, 1]),
        ([[2, 2]], [1, 130], 5, [0, -1, -1]),
        ([[8]], [32], 32, []),
    ],
    ids=str,
)
def test_against_the_reference(
    ranks: list[list[int]], sizes: list[int], inputs: int, places: list[int], dtype: torch.dtype
) -> None:
    for bias in (False, True):
        table, rows = make_table(ranks, sizes, inputs, dtype, bias=bias), len(places)
        x = torch.randn(rows, inputs + 3, device=DEVICE).to(dtype)[:, :inputs]
        wide = torch.randn(rows, sum(sizes) + 2, device=DEVICE).to(dtype)
        out, want, chosen = wide[:, 1:-1], wide.clone()[:, 1:-1], torch.tensor(places, dtype=torch.int32, device=DEVICE)
        before = wide.clone()
        add_adapters(x, chosen, table, out)
        add_adapters_reference(x, chosen, table, want)
        assert torch.equal(wide[:, [0, -1]], before[:, [0, -1]]), "nothing beside the rows is written"
        without = chosen < 0
        assert torch.equal(out[without], before[:, 1:-1][without]), "rows without an adapter keep their bits"
        tiles = tile_rows(chosen, len(ranks))
        again = before.clone()[:, 1:-1]
        start_adapters(x, chosen, table, tiles=tiles, is_ordered=True)(again)
        assert torch.equal(again, out)
        error = float((out.double() - want.double()).norm() / want.double().norm().clamp_min(1e-12))
        assert error <= ERROR[dtype], f"relative error {error}"
        changes = [place for place in places if place >= 0 and (any(ranks[place]) or bias)]
        assert torch.equal(out, before[:, 1:-1]) == (not changes)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3, 40, 300])
def test_tiles_of_a_step(rows: int, dtype: torch.dtype) -> None:
    """Ranks from 1 to 512 in one launch, of which one adapter has no rows and one changes nothing here."""
    table = make_table([[16, 1], [0, 0], [3, 40 if rows > 40 else 512], [5, 5], [24, 17]], [32, 16], 80, dtype)
    chosen = torch.tensor([(0, 2, -1, 4, 1)[row % 5] if row < 90 else 2 for row in range(rows)]).int().to(DEVICE)
    x, out = torch.randn(rows, 80, device=DEVICE).to(dtype), torch.randn(rows, 48, device=DEVICE).to(dtype)
    want, before = out.clone(), out.clone()
    add_adapters(x, chosen, table, out, tiles=tile_rows(chosen, 5))
    add_adapters_reference(x, chosen, table, want)
    same = (chosen < 0) | (chosen == 1)
    assert torch.equal(out[same], before[same]), "rows without an adapter keep their bits"
    assert float((out.double() - want.double()).norm() / want.double().norm()) <= ERROR[dtype]


@pytest.mark.parametrize("programs", [1, 3])
@pytest.mark.parametrize("rows", [30, 300])
def test_programs_share_tiles(rows: int, programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program has tiles of rows, splits of inputs and tiles of outputs in a row, some of them in several parts; ranks
    up to 32 and more, of which some are no multiples of wide loads."""
    for name in ("_PROGRAMS", "_SHRINK_PROGRAMS", "_FEW_PROGRAMS"):
        monkeypatch.setattr(file, name, programs)
    table = make_table([[16, 1], [0, 0], [3, 40], [136, 5]], [400, 16], 600, torch.float16, bias=True)
    chosen = torch.tensor([(0, 2, -1, 3, 1)[row % 5] for row in range(rows)], dtype=torch.int32, device=DEVICE)
    x, out = (torch.randn(rows, size, device=DEVICE).half() for size in (600, 416))
    for norm, few in ((None, 0), (None, 416), (RMSNorm(torch.rand(600, device=DEVICE) + 0.5, 1e-5), 416)):
        monkeypatch.setattr(file, "_MANY_OUTPUTS", few)
        got, want = out.clone(), out.clone()
        add_adapters(x, chosen, table, got, tiles=tile_rows(chosen, 4), norm=norm)
        add_adapters_reference(x, chosen, table, want, norm=norm)
        assert torch.equal(got[chosen < 0], out[chosen < 0])
        assert float((got.double() - want.double()).norm() / want.double().norm()) <= ERROR[torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 3, 4, 7])
def test_rows_are_normalised_or_gated_as_they_are_read(rows: int, dtype: torch.dtype) -> None:
    """Where the product that they are added to has done the same. Large rows, as they are behind many layers: their
    products before the division by a length are more than float16 holds. A part has a bias alone."""
    table = make_table([[3, 0, 20], [0, 0, 1], [0, 8, 40]], [24, 16, 8], 600, dtype, bias=True)
    chosen = torch.tensor([0, 2, -1, 1, 0, 1, 2][:rows], dtype=torch.int32, device=DEVICE)
    out, size = torch.randn(rows, 48, device=DEVICE).to(dtype), 2000 if dtype != torch.float32 else 1
    x, both = torch.randn(rows, 600, device=DEVICE) * size, torch.randn(rows, 1200, device=DEVICE)
    weight = 1 + torch.rand(600, device=DEVICE) * 40
    for one in (RMSNorm(weight.to(dtype), 1e-5), RMSNorm(weight, 1e-5), None):
        got, want, rows_of = out.clone(), out.clone(), (both if one is None else x).to(dtype)
        tiles = tile_rows(chosen, 3) if rows % 2 else None
        add_adapters(rows_of, chosen, table, got, norm=one, gated=one is None, tiles=tiles)
        add_adapters_reference(rows_of, chosen, table, want, norm=one, gated=one is None)
        assert torch.equal(got[chosen < 0], out[chosen < 0]) and bool(got.isfinite().all())
        error = float((got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-12))
        assert error <= ERROR[dtype], f"relative error {error}"


@pytest.mark.skipif(DEVICE == "cpu", reason="no GPU")
@pytest.mark.parametrize("is_ordered", [False, True])
@pytest.mark.parametrize("rows", [2, 64, 300])
def test_a_captured_step_has_the_adapters_of_each_replay(rows: int, *, is_ordered: bool) -> None:
    """Kernels read places and tiles of a step before the product that they add to has ended."""
    table = make_table([[16, 8], [64, 3], [0, 20]], [256, 128], 512, torch.bfloat16)
    x, weight = torch.randn(rows, 512, device=DEVICE).bfloat16(), torch.randn(384, 512, device=DEVICE).bfloat16() / 23
    chosen, out = torch.full((rows,), -1, dtype=torch.int32, device=DEVICE), x.new_empty(rows, 384)

    def step() -> None:
        places = chosen.clone()
        tiles = tile_rows(places, 3)
        add_to = start_adapters(x, places, table, tiles=tiles, is_ordered=is_ordered)
        torch.mm(x, weight.T, out=out)
        add_to(out)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(5):
        chosen.copy_(torch.randint(-1, 3, (rows,)))
        graph.replay()
        want = x @ weight.T
        add_adapters_reference(x, chosen, table, want)
        assert float((out.double() - want.double()).norm() / want.double().norm()) <= ERROR[torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_whatever_is_beside_it(dtype: torch.dtype) -> None:
    table = replace(make_table([[16, 7], [40, 3]], [32, 16], 600, dtype, bias=True), batch_invariant=True)
    chosen = torch.tensor([(1, 0, -1)[row % 3] for row in range(280)], dtype=torch.int32, device=DEVICE)
    x, before = torch.randn(280, 600, device=DEVICE).to(dtype), torch.randn(280, 48, device=DEVICE).to(dtype)
    found = []
    for some in (slice(None), slice(20, 50), slice(24, 27), slice(24, 25)):
        out, tiles = before[some].clone(), tile_rows(chosen[some], 2, batch_invariant=True)
        add_adapters(x[some], chosen[some], table, out, tiles=tiles)
        found.append(out[24 - (some.start or 0)])
    assert all(torch.equal(one, found[0]) for one in found[1:]) and not torch.equal(found[0], before[24])


def test_tiles_have_the_rows_of_one_place() -> None:
    for rows in (5, 64, 300):
        chosen = torch.randint(-1, 4, (rows,), dtype=torch.int32, device=DEVICE)
        tiles, seen = tile_rows(chosen, 4), list[int]()
        assert tiles.tile == (16 if rows < 300 else 64)
        for owner, of_tile in zip(tiles.owners.tolist(), tiles.rows.view(-1, tiles.tile).tolist(), strict=True):
            own = [row for row in of_tile if row < rows] if owner >= 0 else []
            assert all(chosen[row] == owner for row in own)
            seen += own
        assert sorted(seen) == (chosen >= 0).nonzero().flatten().tolist()
    few = tile_rows(chosen[:4], 4)
    assert few.tile == 1 and few.owners is few.rows and torch.equal(few.owners, chosen[:4])


@pytest.mark.parametrize("rows", [4, 6])
def test_parts_of_several_gpus(rows: int) -> None:
    """Each of three has some rows of A, or none; between the products they add what they have."""
    table = make_table([[1, 5], [40, 0]], [48, 16], 72, torch.float32)
    chosen = torch.tensor([0, 1, -1, 1, 1, 0][:rows], dtype=torch.int32, device=DEVICE)
    x, out = torch.randn(rows, 72, device=DEVICE), torch.randn(rows, 64, device=DEVICE)
    want, shrunk, tables = out.clone(), list[torch.Tensor](), list[AdapterTable]()
    add_adapters_reference(x, chosen, table, want)
    for gpu in range(3):
        firsts, ends = table.ranks * gpu // 3, table.ranks * (gpu + 1) // 3
        offsets = table.offsets.clone()
        offsets[..., 0] += firsts * 72
        tables.append(replace(table, offsets=offsets, own_ranks=torch.stack((firsts, ends - firsts), 2)))

    def keep(h: torch.Tensor) -> torch.Tensor:
        shrunk.append(h.clone())
        return h

    for add in (add_adapters, add_adapters_reference):
        shrunk.clear()
        for one in tables:
            add(x, chosen, one, out.clone(), keep)
        got = out.clone()
        add(x, chosen, tables[0], got, lambda h: torch.stack(shrunk).sum(0))
        torch.testing.assert_close(got, want)
        assert all(h[:2].count_nonzero() < torch.stack(shrunk).sum(0)[:2].count_nonzero() for h in shrunk)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("of_pairs", [False, True])
@pytest.mark.parametrize("places", [[1, -1, 0, 1], [-1], []], ids=str)
def test_experts_are_as_a_place_each(
    places: list[int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, *, of_pairs: bool
) -> None:
    """Three experts, of which each row has two; x is of rows or of pairs, and results may have weights. Programs share
    the tiles."""
    for name in ("_PROGRAMS", "_SHRINK_PROGRAMS"):
        monkeypatch.setattr(file, name, 2)
    ranks, top_k, inputs = [[3, 0], [0, 0], [18, 2], [1, 1], [5, 4], [0, 7]], 2, 70
    of_places = make_table(ranks, [20, 33], inputs, dtype, bias=True)
    table, rows = in_places(of_places, 3), len(places)
    chosen = torch.tensor(places, dtype=torch.int32, device=DEVICE)
    experts = torch.tensor([[0, 2], [1, 0], [2, 3], [2, 0]], dtype=torch.int32, device=DEVICE)[:rows]
    weights = torch.rand(rows, top_k, device=DEVICE)
    x = torch.randn(rows * (top_k if of_pairs else 1), inputs, device=DEVICE).to(dtype)
    of_pair = x if of_pairs else x.repeat_interleave(top_k, 0)
    is_here = (chosen[:, None] >= 0) & (experts < 3)  # the last number is of experts that another GPU has
    alone = torch.where(is_here, chosen[:, None] * 3 + experts, -1).flatten().int()
    for factors in (None, weights):
        out = torch.randn(rows * top_k, 53, device=DEVICE).to(dtype)
        got, want, added = out.clone(), out.clone(), torch.zeros_like(out, dtype=torch.float32)
        add_adapters(x, chosen, table, got, experts=experts, weights=factors)
        add_adapters_reference(x, chosen, table, want, experts=experts, weights=factors)
        add_adapters_reference(of_pair, alone, of_places, added)
        added = added if factors is None else added * factors.view(-1, 1)
        for one in (got, want):
            assert torch.equal(one[alone < 0], out[alone < 0]), "pairs without an adapter keep their bits"
            torch.testing.assert_close(one.float(), out.float() + added, rtol=2 * ERROR[dtype], atol=4 * ERROR[dtype])


def test_what_does_not_fit_is_refused() -> None:
    table = make_table([[4]], [8], 16, torch.float32)
    x, out = torch.randn(2, 16, device=DEVICE), torch.randn(2, 8, device=DEVICE)
    places = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    for wrong in ((x, places.long(), out), (x, places[:1], out), (x[:1], places, out), (x.T, places, out)):
        with pytest.raises(ValueError):
            add_adapters(wrong[0], wrong[1], table, wrong[2])
    experts = torch.zeros(2, 3, dtype=torch.int32, device=DEVICE)
    for chosen, to in ((experts, out), (experts.long(), out.repeat(3, 1)), (experts[:1], out.repeat(3, 1))):
        with pytest.raises(ValueError):
            add_adapters(x, places, table, to, experts=chosen)
    norm = RMSNorm(torch.ones(16, device=DEVICE), 1e-6)
    with pytest.raises(ValueError, match="nor are those of several GPUs normalised"):
        add_adapters(x, places, table, out, lambda h: h, norm=norm)


LAUNCHES = """
from dataclasses import replace

from blockyard.kernels.layers.rms_norm import RMSNorm
from blockyard.kernels.lora import add_adapters as file
from blockyard.kernels.lora.adapter_table import AdapterTable
from blockyard.kernels.lora.adapter_tiles import tile_rows

file.supports_pdl = lambda device: True
ints = lambda *shape: torch.zeros(*shape, dtype=torch.int32)
for rows, rank, parts in ((1, 16, 3), (64, 16, 3), (2048, 512, 3), (2048, 16, 1)):
    arena, offsets = torch.zeros(64).bfloat16(), torch.zeros(8, parts, 3).long()
    table = AdapterTable(arena, offsets, ints(8, parts), ints(parts), ints(parts), 4096, rank, is_wide=True)
    x, out, tiles = torch.zeros(rows, 4096).bfloat16(), torch.zeros(rows, 6144).bfloat16(), tile_rows(ints(rows), 8)
    file.add_adapters(x, ints(rows), table, out, tiles=tiles)
    if rows == 1:
        file.add_adapters(x, ints(rows), table, out, tiles=tiles, norm=RMSNorm(x[0], 1e-5))
        file.add_adapters(x.repeat(1, 2), ints(rows), table, out, tiles=tiles, gated=True)
        halves = replace(table, arena=arena.half())  # --lora-dtype may be another dtype than the model's
        file.add_adapters(x, ints(rows), halves, out, tiles=tiles)
        file.add_adapters(x.half(), ints(rows), halves, out.half(), tiles=tiles, norm=RMSNorm(x[0].half(), 1e-5))
table = AdapterTable(arena, offsets.repeat(1, 192, 1), ints(8, 192), ints(3), ints(3), 768, 16, is_wide=True)
x, out, weights = torch.zeros(64, 2048).bfloat16(), torch.zeros(512, 1536).bfloat16(), torch.zeros(64, 8)
file.add_adapters(x, ints(64), table, out, experts=ints(64, 8), weights=weights)
"""


def test_sizes_of_an_8b_model_compile_for_an_h100(tmp_path: Path) -> None:
    found = shared_bytes(LAUNCHES, tmp_path)
    few = {"shrink_row_kernel", "expand_row_kernel", "expand_few_kernel"}
    assert {name for name, _ in found} == {"shrink_kernel", "expand_kernel", "map_experts_kernel", *few}
    assert max(size for _, size in found) <= SHARED // 2, "two programs fit a multiprocessor"
