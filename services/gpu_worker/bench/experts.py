"""Times routers in float32 of DeepSeek's sizes, and a layer of Qwen3-30B-A3B's experts.

Of the layer: routing with its map, each product alone, and all behind the routing, evenly routed and not.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from blockyard.kernels.moe.experts_skinny import SkinnyTiling, down_skinny, gate_up_skinny
from blockyard.kernels.moe.few_rows import MAX_ROWS
from blockyard.kernels.moe.gates import Gate
from blockyard.kernels.moe.grouped_linear import GroupedTiling, grouped_linear
from blockyard.kernels.moe.map_experts import map_experts
from blockyard.kernels.moe.route_experts import route_experts
from blockyard.kernels.moe.router_linear import MOST_TILES, router_linear
from blockyard.kernels.moe.routing import Routing
from blockyard.kernels.programmatic_launch import supports_pdl
from blockyard.services.gpu_worker.bench.row import Row, row
from blockyard.services.gpu_worker.bench.timing import DEVICE, copies, graph_seconds
from blockyard.services.gpu_worker.layers.moe.expert_configs import ExpertConfig, ExpertShape, candidates
from blockyard.services.gpu_worker.layers.moe.expert_weights import ExpertWeights
from blockyard.services.gpu_worker.layers.moe.grouped_experts import GroupedExperts
from blockyard.services.gpu_worker.quantization.dense import UnquantizedExperts

HIDDEN, INNER = 2048, 768
ROUTING = Routing(num_experts=128, top_k=8)
DTYPE = torch.bfloat16
ROUTERS = ((64, 2048), (256, 7168))  # experts and hidden size of DeepSeek-V2-Lite and V3
ROUTER_ROWS = (1, 64, 2048)
ROUTED_ROWS = (1, 256, 8192)
ROWS = (1, 8, 64, 256, 8192)
ROWS_ALONE = (1, 8, 64)  # of each product
SKEWED = 13  # experts that get half of the pairs: a tenth of them


def measure() -> list[Row]:
    with torch.inference_mode(), torch.device(DEVICE):
        rows = [_router(num, *sizes) for sizes in ROUTERS for num in ROUTER_ROWS]
        rows += [_routing(num) for num in ROUTED_ROWS]
        for num in ROWS_ALONE:
            rows += _each_product(num, even(num))
        for num in ROWS:
            rows.append(_products(num, even(num), "even"))
            if num >= 64:
                rows.append(_products(num, skewed(num), "skewed"))
        return rows


def even(num_rows: int) -> Tensor:
    """Experts [rows, top_k] int32, each as likely as any other."""
    return torch.rand(num_rows, ROUTING.num_experts).topk(ROUTING.top_k).indices.int()


def skewed(num_rows: int) -> Tensor:
    """Gives `SKEWED` experts half of all pairs, and the others equal parts of the rest: see `even`."""
    odds = torch.ones(ROUTING.num_experts)
    odds[:SKEWED] = (ROUTING.num_experts - SKEWED) / SKEWED
    return torch.multinomial(odds.expand(num_rows, -1), ROUTING.top_k).int()


def _router(num_rows: int, num_experts: int, hidden: int) -> Row:
    """Counts the operations of three bfloat16 products, which make one float32 product."""
    x, arrived = torch.randn(num_rows, hidden).to(DTYPE), torch.zeros(MOST_TILES, dtype=torch.int32)
    num_bytes = 4 * num_experts * hidden + num_rows * (2 * hidden + 4 * num_experts)
    weights = [torch.randn(num_experts, hidden) for _ in range(copies(num_bytes))]
    calls = [partial(router_linear, x, weight, arrived, pdl=supports_pdl(x.device)) for weight in weights]
    shape = f"{num_rows} x {num_experts} x {hidden:,}"
    return row("router in float32", shape, graph_seconds(calls), num_bytes, 6 * num_rows * num_experts * hidden)


def _routing(num_rows: int) -> Row:
    logits = torch.randn(num_rows, ROUTING.num_experts).to(DTYPE)
    tile = _config(num_rows).tile

    def run() -> None:
        experts, _ = route_experts(logits, ROUTING)
        if num_rows > MAX_ROWS:
            map_experts(experts, ROUTING.num_experts, tile)

    num_bytes = logits.nbytes + num_rows * ROUTING.top_k * 12
    return row(
        "routing and, if needed, map", f"{num_rows} x {ROUTING.num_experts}", graph_seconds([run] * 20), num_bytes
    )


def _config(num_rows: int) -> ExpertConfig:
    return candidates(ExpertShape(ROUTING.num_experts, ROUTING.top_k, HIDDEN, INNER), num_rows)[0]


def _each_product(num_rows: int, experts: Tensor) -> list[Row]:
    """Gate and up, and down: with the kernels that `GroupedExperts` takes for so many rows, over rotating weights."""
    hit, num_pairs = int(experts.flatten().bincount().count_nonzero()), experts.numel()
    x, inner = torch.randn(num_rows, HIDDEN).to(DTYPE), torch.randn(num_pairs, INNER).to(DTYPE)
    scale, config = torch.rand(num_rows, ROUTING.top_k), _config(num_rows)
    mapped = experts if num_rows <= MAX_ROWS else map_experts(experts, ROUTING.num_experts, config.tile)
    is_skinny = config.kernel == "skinny"

    def gate_up(weight: Tensor) -> Tensor:
        if is_skinny:
            return gate_up_skinny(x, weight, experts, SkinnyTiling(*config.gate_up), Gate.SILU)
        return grouped_linear(x, weight, mapped, num_pairs, GroupedTiling(*config.gate_up), gate=Gate.SILU)

    def down(weight: Tensor) -> Tensor:
        if is_skinny:
            return down_skinny(inner, weight, experts, SkinnyTiling(*config.down), scale=scale)
        return grouped_linear(inner, weight, mapped, num_pairs, GroupedTiling(*config.down), scale=scale)

    def measured(name: str, product: Callable[[Tensor], Tensor], outs: int, size: int, rows: int) -> Row:
        weights = [_weight(outs, size) for _ in range(copies(2 * hit * outs * size))]
        seconds = graph_seconds([partial(product, weight) for weight in weights])
        num_bytes = 2 * (hit * outs * size + rows * size)
        return row(name, f"{num_rows} rows, even, {hit} experts hit", seconds, num_bytes, 2 * num_pairs * outs * size)

    return [
        measured("gate and up of experts", gate_up, 2 * INNER, HIDDEN, num_rows),
        measured("down of experts", down, HIDDEN, INNER, num_pairs),
    ]


def _products(num_rows: int, experts: Tensor, kind: str) -> Row:
    """Bytes are the weights of the hit experts, read once, and the rows."""
    hit = int(experts.flatten().bincount().count_nonzero())
    num_pairs = experts.numel()
    num_bytes = 2 * (hit * 3 * HIDDEN * INNER + 2 * num_rows * HIDDEN)
    layers = [_layer() for _ in range(copies(2 * ROUTING.num_experts * 3 * HIDDEN * INNER))]
    x, weights = torch.randn(num_rows, HIDDEN).to(DTYPE), torch.rand(num_rows, ROUTING.top_k)
    seconds = graph_seconds([partial(layer.forward, x, experts, weights, None) for layer in layers])
    shape = f"{num_rows} rows, {kind}, {hit} experts hit"
    return row("experts and their sum", shape, seconds, num_bytes, 2 * num_pairs * 3 * HIDDEN * INNER)


def _layer() -> GroupedExperts:
    gate_up, down = UnquantizedExperts(_weight(2 * INNER, HIDDEN)), UnquantizedExperts(_weight(HIDDEN, INNER))
    weights = ExpertWeights(gate_up=gate_up, down=down, device=torch.device(DEVICE))
    return GroupedExperts(weights, ROUTING, Gate.SILU, scales_input=False)


def _weight(outs: int, size: int) -> Tensor:
    return torch.randn(ROUTING.num_experts, outs, size, dtype=DTYPE).mul_(0.02)
