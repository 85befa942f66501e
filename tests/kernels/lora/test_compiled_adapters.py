"""Products of adapters in bfloat16 as they are compiled for an H100, against the reference. What is compiled runs on
the CPU, where an access of memory that is less aligned than the kernels tell the compiler is an error."""

from pathlib import Path

from compile_for_hopper import shared_bytes

BEGIN = """
from dataclasses import replace

import torch
from adapters.adapter_tables import ERROR, in_places, make_table
from ptx.launches import emulate_launches

from blockyard.kernels.layers.rms_norm import RMSNorm
from blockyard.kernels.lora import add_adapters as file
from blockyard.kernels.lora.adapter_table import AdapterTiles, add_adapters_reference
from blockyard.kernels.moe.map_experts import map_experts_reference

emulate_launches()
file.supports_pdl = lambda device: True
torch.manual_seed(2)
few, more = torch.tensor([1, 0]).int(), torch.tensor([1, 0, -1, 0, 0, 1, 1]).int()


def tiled(owners, num_owners):
    made = map_experts_reference(owners, num_owners, 16)
    return AdapterTiles(made.pairs, made.experts, made.tile)


def check(table, places, tiles, inputs, is_ordered=False, **options):
    rows = len(places) if options.get("experts") is None else options["experts"].numel()
    x, out = torch.randn(len(places), inputs).bfloat16(), torch.randn(rows, int(table.sizes.sum())).bfloat16()
    got, want = out.clone(), out.clone()
    file.start_adapters(x, places, table, tiles=tiles, is_ordered=is_ordered, **options)(got)
    add_adapters_reference(x, places, table, want, **options)
    error = float((got.double() - want.double()).norm() / want.double().norm())
    assert error <= ERROR[torch.bfloat16] and not torch.equal(want, out), error
"""
OF_LAYERS = """
for ranks, sizes, inputs in (([[16, 8], [3, 40]], [64, 32], 264), ([[1, 0], [7, 2]], [33, 7], 73)):
    table = make_table(ranks, sizes, inputs, torch.bfloat16, bias=True)
    norm = RMSNorm((torch.rand(inputs) + 0.5).bfloat16(), 1e-5)
    check(table, few, AdapterTiles(few, few, 1), inputs, norm=norm)
    check(table, few, AdapterTiles(few, few, 1), 2 * inputs, gated=True)
    check(replace(table, batch_invariant=True), few, AdapterTiles(few, few, 1), inputs)
    check(table, more, tiled(torch.where(more < 0, 2, more)[:, None].int(), 2), inputs)
"""
OF_SLABS = """
file._PROGRAMS = file._SHRINK_PROGRAMS = file._BEHIND_PROGRAMS = file._FEW_PROGRAMS = 2
table = make_table([[16, 8], [3, 136]], [656, 32], 600, torch.bfloat16)
tiles = tiled(torch.where(more < 0, 2, more)[:, None].int(), 2)
check(table, more, tiles, 600, is_ordered=True)
file._MANY_OUTPUTS = 0
check(table, more, tiles, 600)
"""
OF_EXPERTS = """
table = in_places(make_table([[16], [8], [3], [0]], [40], 96, torch.bfloat16, bias=True), 2)
table = replace(table, offsets=table.offsets.contiguous(), ranks=table.ranks.contiguous())
experts = torch.tensor([[0, 1], [1, 2], [2, 0], [1, 0], [0, 1], [0, 2], [1, 0]]).int()
check(table, more, tiled(experts, 2), 96, experts=experts, weights=torch.rand(7, 2))
"""


def test_rows_of_layers(tmp_path: Path) -> None:
    """Few and more rows, normalised or gated, with widths that are multiples of wide loads and that are not."""
    assert len(shared_bytes(BEGIN + OF_LAYERS, tmp_path)) == 2 * 4 * 2


def test_programs_share_tiles(tmp_path: Path) -> None:
    """Each has several tiles of outputs: of few, in turn; of many, in a row, which it loads by asynchronous copies."""
    assert len(shared_bytes(BEGIN + OF_SLABS, tmp_path)) == 2 * 2


def test_pairs_of_experts(tmp_path: Path) -> None:
    assert len(shared_bytes(BEGIN + OF_EXPERTS, tmp_path)) == 2
