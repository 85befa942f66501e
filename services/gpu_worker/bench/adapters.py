"""Times what LoRA adapters add to the linear layers of Llama-3.1-8B, and to the experts of Qwen3-30B-A3B: both products
of all parts of a layer."""

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from blockyard.kernels.lora.adapter_table import ALIGNED, NO_OFFSET, AdapterTable, AdapterTiles
from blockyard.kernels.lora.adapter_tiles import tile_rows
from blockyard.kernels.lora.add_adapters import add_adapters
from blockyard.kernels.moe.map_experts import map_experts
from blockyard.services.gpu_worker.bench.row import Row, row
from blockyard.services.gpu_worker.bench.timing import DEVICE, copies, graph_seconds
from blockyard.services.gpu_worker.layers.moe.expert_configs import ExpertShape, pick_unfused
from blockyard.services.gpu_worker.lora.device.adapter_pages import aligned


class LayerWidths(NamedTuple):
    name: str
    inputs: int
    sizes: tuple[int, ...]  # outputs of each part
    num_experts: int = 1


LAYERS = (
    LayerWidths("qkv", 4096, (4096, 1024, 1024)),
    LayerWidths("o", 4096, (4096,)),
    LayerWidths("gate and up", 4096, (14336, 14336)),
    LayerWidths("down", 14336, (4096,)),
)
EXPERT_LAYERS = (
    LayerWidths("gate and up of experts", 2048, (768, 768), 128),
    LayerWidths("down of experts", 768, (2048,), 128),  # its rows are pairs
)
TOP_K = 8
RANK = 16
CASES = ((1, 1), (64, 1), (64, 8), (64, 64), (2048, 1))  # rows and adapters
EXPERT_CASES = ((1, 1), (64, 1), (64, 8))
MOST_COPIES = 1024  # the matrices of one adapter are small
DTYPE = torch.bfloat16


def measure() -> list[Row]:
    with torch.inference_mode(), torch.device(DEVICE):
        found = [_layer(layer, *case) for case in CASES for layer in LAYERS]
        return found + [_experts(layer, *case) for case in EXPERT_CASES for layer in EXPERT_LAYERS]


def _layer(layer: LayerWidths, rows: int, num_adapters: int) -> Row:
    """Each adapter has as many rows, one behind the other. The rows of a step are grouped once for all its layers."""
    outputs, item = sum(layer.sizes), DTYPE.itemsize
    pair_elements = RANK * (layer.inputs * len(layer.sizes) + outputs)
    num_bytes = item * (num_adapters * pair_elements + rows * (layer.inputs + 2 * outputs))
    num = copies(num_bytes, MOST_COPIES)
    all_places = make_table(layer, num * num_adapters)
    places = _places(rows, num_adapters)
    tiles, calls = tile_rows(places, num_adapters), []
    for i in range(num):
        x, out = torch.randn(rows, layer.inputs).to(DTYPE), torch.zeros(rows, outputs, dtype=DTYPE)
        table = some_places(all_places, range(i * num_adapters, (i + 1) * num_adapters))
        calls.append(partial(add_adapters, x, places, table, out, tiles=tiles))
    shape = f"{rows} x {layer.inputs} x {outputs}, {_described(num_adapters)}"
    return row(f"adapters of {layer.name}", shape, graph_seconds(calls), num_bytes, 2 * rows * pair_elements)


def _experts(layer: LayerWidths, rows: int, num_adapters: int) -> Row:
    """As `_layer`, of experts of which each is as likely as any other. The pairs are mapped for the layer's product."""
    outputs, item, pairs = sum(layer.sizes), DTYPE.itemsize, rows * TOP_K
    (gate_up, down), is_down = EXPERT_LAYERS, layer is EXPERT_LAYERS[1]
    experts = torch.rand(rows, layer.num_experts).topk(TOP_K).indices.int()
    places, weights = _places(rows, num_adapters), torch.rand(rows, TOP_K) if is_down else None
    hit = len(set((places[:, None] * layer.num_experts + experts).flatten().tolist()))
    inputs = pairs if is_down else rows
    pair_elements = RANK * (layer.inputs * len(layer.sizes) + outputs)
    num_bytes = item * (hit * pair_elements + inputs * layer.inputs + 2 * pairs * outputs)
    shape = ExpertShape(layer.num_experts, TOP_K, gate_up.inputs, down.inputs)
    mapped = map_experts(experts, layer.num_experts, pick_unfused(shape, rows, {}).tile)
    tiles, calls, num = AdapterTiles(mapped.pairs, mapped.experts, mapped.tile), [], copies(num_bytes, MOST_COPIES)
    all_places = make_table(layer, num * num_adapters)
    for i in range(num):
        x, out = torch.randn(inputs, layer.inputs).to(DTYPE), torch.zeros(pairs, outputs, dtype=DTYPE)
        table = some_places(all_places, range(i * num_adapters, (i + 1) * num_adapters))
        calls.append(partial(add_adapters, x, places, table, out, experts=experts, weights=weights, tiles=tiles))
    described = f"{rows} rows, {hit} of adapters and experts hit, {_described(num_adapters)}"
    return row(f"adapters of {layer.name}", described, graph_seconds(calls), num_bytes, 2 * pairs * pair_elements)


def _places(rows: int, num_adapters: int) -> Tensor:
    return torch.arange(num_adapters).repeat_interleave(rows // num_adapters).int()


def _described(num_adapters: int) -> str:
    return f"{'1 adapter' if num_adapters == 1 else f'{num_adapters} adapters'} of rank {RANK}"


def some_places(table: AdapterTable, places: range) -> AdapterTable:
    """A table of some of the places."""
    own = slice(places.start, places.stop)
    return replace(table, offsets=table.offsets[own], ranks=table.ranks[own])


def make_table(layer: LayerWidths, num_places: int) -> AdapterTable:
    """Random adapters of one layer."""
    offsets, end = list[list[int]](), 0
    for size in layer.sizes * layer.num_experts:
        b_at = end + aligned(RANK * layer.inputs)
        offsets.append([end, b_at, NO_OFFSET])
        end = b_at + aligned(RANK * size)
    of_one = torch.tensor([offsets])
    starts = [sum(layer.sizes[:part]) for part in range(len(layer.sizes))]
    return AdapterTable(
        torch.randn(num_places * end, dtype=DTYPE),
        of_one + torch.arange(num_places)[:, None, None] * end * (of_one >= 0),
        torch.full((num_places, len(offsets)), RANK, dtype=torch.int32),
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor(layer.sizes, dtype=torch.int32),
        max(layer.sizes),
        RANK,
        is_wide=not any(one % ALIGNED for one in (*starts, *layer.sizes)),
    )
