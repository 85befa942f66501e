"""Products of adapters against the reference: mixed ranks, parts without matrices, rows without adapters."""

from pathlib import Path

import pytest
import torch
from compile_for_hopper import shared_bytes

from blockyard.kernels.lora.adapter_table import OFFSETS, AdapterTable, add_adapters_reference
from blockyard.kernels.lora.add_adapters import add_adapters

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ERROR = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]


def make(
    ranks: list[list[int]], sizes: list[int], inputs: int, dtype: torch.dtype, *, bias: bool = False
) -> AdapterTable:
    """A table of adapters with these ranks, by place and part. bias: the last part of each place has one."""
    pieces, offsets, end = [torch.full((3,), float("nan"))], torch.full((len(ranks), len(sizes), OFFSETS), -1), 3
    for place, of_place in enumerate(ranks):
        for part, (rank, size) in enumerate(zip(of_place, sizes, strict=True)):
            wanted = [rank * inputs, size * rank, size if bias and part == len(sizes) - 1 else 0]
            for i, count in enumerate(wanted):
                if count:
                    offsets[place, part, i] = end
                    pieces.append(torch.randn(count) * (1 if i == 2 else inputs**-0.5 if i == 0 else 0.3))
                    end += count
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    most = max([1, *(rank for of_place in ranks for rank in of_place)])
    return AdapterTable(
        torch.cat(pieces).to(dtype).to(DEVICE),
        offsets.to(DEVICE),
        torch.tensor(ranks, dtype=torch.int32, device=DEVICE).view(len(ranks), len(sizes)),
        torch.tensor(starts, dtype=torch.int32, device=DEVICE),
        torch.tensor(sizes, dtype=torch.int32, device=DEVICE),
        max(sizes),
        most,
    )


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
        table, rows = make(ranks, sizes, inputs, dtype, bias=bias), len(places)
        x = torch.randn(rows, inputs + 3, device=DEVICE).to(dtype)[:, :inputs]
        wide = torch.randn(rows, sum(sizes) + 2, device=DEVICE).to(dtype)
        out, want, chosen = wide[:, 1:-1], wide.clone()[:, 1:-1], torch.tensor(places, dtype=torch.int32, device=DEVICE)
        before = wide.clone()
        add_adapters(x, chosen, table, out)
        add_adapters_reference(x, chosen, table, want)
        assert torch.equal(wide[:, [0, -1]], before[:, [0, -1]]), "nothing beside the rows is written"
        without = chosen < 0
        assert torch.equal(out[without], before[:, 1:-1][without]), "rows without an adapter keep their bits"
        error = float((out.double() - want.double()).norm() / want.double().norm().clamp_min(1e-12))
        assert error <= ERROR[dtype], f"relative error {error}"
        changes = [place for place in places if place >= 0 and (any(ranks[place]) or bias)]
        assert torch.equal(out, before[:, 1:-1]) == (not changes)


def test_what_does_not_fit_is_refused() -> None:
    table = make([[4]], [8], 16, torch.float32)
    x, out = torch.randn(2, 16, device=DEVICE), torch.randn(2, 8, device=DEVICE)
    places = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    for wrong in ((x, places.long(), out), (x, places[:1], out), (x[:1], places, out), (x.T, places, out)):
        with pytest.raises(ValueError):
            add_adapters(wrong[0], wrong[1], table, wrong[2])


LAUNCHES = """
from blockyard.kernels.lora import add_adapters as file
from blockyard.kernels.lora.adapter_table import AdapterTable

file.supports_pdl = lambda device: True
ints = lambda *shape: torch.zeros(*shape, dtype=torch.int32)
for rows, rank in ((1, 16), (64, 16), (2048, 512)):
    arena, offsets = torch.zeros(64).bfloat16(), torch.zeros(8, 3, 3).long()
    table = AdapterTable(arena, offsets, ints(8, 3), ints(3), ints(3), 4096, rank)
    file.add_adapters(torch.zeros(rows, 4096).bfloat16(), ints(rows), table, torch.zeros(rows, 6144).bfloat16())
"""


def test_sizes_of_an_8b_model_compile_for_an_h100(tmp_path: Path) -> None:
    assert {name for name, _ in shared_bytes(LAUNCHES, tmp_path, 300)} == {"shrink_kernel", "expand_kernel"}
