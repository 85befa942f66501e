"""Times a layer of experts: routers in float32 of DeepSeek's sizes, and of Qwen3-30B-A3B routing with its map, and both
grouped products, evenly routed and not."""

from functools import partial

import torch
from torch import Tensor

from blockyard.kernels.moe.gates import Gate
from blockyard.kernels.moe.grouped_linear_prefill import TILE as PREFILL_TILE
from blockyard.kernels.moe.map_experts import map_experts
from blockyard.kernels.moe.route_experts import route_experts
from blockyard.kernels.moe.router_linear import MOST_TILES, router_linear
from blockyard.kernels.moe.routing import Routing
from blockyard.kernels.programmatic_launch import supports_pdl
from blockyard.services.gpu_worker.bench.row import Row, row
from blockyard.services.gpu_worker.bench.timing import DEVICE, copies, graph_seconds
from blockyard.services.gpu_worker.layers.expert_weights import ExpertWeights
from blockyard.services.gpu_worker.layers.grouped_experts import FEWEST_PREFILL_PAIRS, GroupedExperts, pick_tilings

HIDDEN, INNER = 2048, 768
ROUTING = Routing(num_experts=128, top_k=8)
DTYPE = torch.bfloat16
ROUTERS = ((64, 2048), (256, 7168))  # experts and hidden size of DeepSeek-V2-Lite and V3
ROUTER_ROWS = (1, 64, 2048)
ROUTED_ROWS = (1, 256, 8192)
ROWS = (1, 8, 64, 256, 8192)
SKEWED = 13  # experts that get half of the pairs: a tenth of them


def measure() -> list[Row]:
    with torch.inference_mode(), torch.device(DEVICE):
        rows = [_router(num, *sizes) for sizes in ROUTERS for num in ROUTER_ROWS]
        rows += [_routing(num) for num in ROUTED_ROWS]
        for num in ROWS:
            rows.append(_products(num, even(num), "even"))
            if num >= 64:
                rows.append(_products(num, skewed(num), "skewed"))
        return rows


def even(num_rows: int) -> Tensor:
    """Experts [rows, top_k] int32, each as likely as any other."""
    return torch.rand(num_rows, ROUTING.num_experts).topk(ROUTING.top_k).indices.int()


def skewed(num_rows: int) -> Tensor:
    """As `even`, but `SKEWED` experts get half of all pairs."""
    odds = torch.ones(ROUTING.num_experts)
    odds[:SKEWED] = (ROUTING.num_experts - SKEWED) / SKEWED
    return torch.multinomial(odds.expand(num_rows, -1), ROUTING.top_k).int()


def _router(num_rows: int, num_experts: int, hidden: int) -> Row:
    """Operations are those of the three products of bfloat16 that one of float32 takes."""
    x, arrived = torch.randn(num_rows, hidden).to(DTYPE), torch.zeros(MOST_TILES, dtype=torch.int32)
    num_bytes = 4 * num_experts * hidden + num_rows * (2 * hidden + 4 * num_experts)
    weights = [torch.randn(num_experts, hidden) for _ in range(copies(num_bytes))]
    calls = [partial(router_linear, x, weight, arrived, pdl=supports_pdl(x.device)) for weight in weights]
    shape = f"{num_rows} x {num_experts} x {hidden:,}"
    return row("router in float32", shape, graph_seconds(calls), num_bytes, 6 * num_rows * num_experts * hidden)


def _routing(num_rows: int) -> Row:
    logits = torch.randn(num_rows, ROUTING.num_experts).to(DTYPE)
    num_pairs = num_rows * ROUTING.top_k
    many = num_pairs >= FEWEST_PREFILL_PAIRS * ROUTING.num_experts
    tile = PREFILL_TILE if many else pick_tilings(num_pairs, ROUTING.num_experts).tile

    def run() -> None:
        map_experts(route_experts(logits, ROUTING)[0], ROUTING.num_experts, tile)

    num_bytes = logits.nbytes + num_rows * ROUTING.top_k * 12
    return row("routing and map", f"{num_rows} x {ROUTING.num_experts}", graph_seconds([run] * 20), num_bytes)


def _products(num_rows: int, experts: Tensor, kind: str) -> Row:
    """Bytes are the weights of the hit experts, read once, and the rows."""
    hit = int(experts.flatten().bincount().count_nonzero())
    num_pairs = experts.numel()
    num_bytes = 2 * (hit * 3 * HIDDEN * INNER + 2 * num_rows * HIDDEN)
    layers = [_layer() for _ in range(copies(2 * ROUTING.num_experts * 3 * HIDDEN * INNER))]
    x, weights = torch.randn(num_rows, HIDDEN).to(DTYPE), torch.rand(num_rows, ROUTING.top_k)
    seconds = graph_seconds([partial(layer.forward, x, experts, weights, None) for layer in layers])
    shape = f"{num_rows} rows, {kind}, {hit} experts hit"
    return row("map, experts and their sum", shape, seconds, num_bytes, 2 * num_pairs * 3 * HIDDEN * INNER)


def _layer() -> GroupedExperts:
    gate_up = torch.randn(ROUTING.num_experts, 2 * INNER, HIDDEN, dtype=DTYPE).mul_(0.02)
    down = torch.randn(ROUTING.num_experts, HIDDEN, INNER, dtype=DTYPE).mul_(0.02)
    return GroupedExperts(ExpertWeights(gate_up=gate_up, down=down), ROUTING, Gate.SILU, scales_input=False)
