"""Times attention of one row between two linear layers on a GPU: one kernel (`fused_decode`), and kernels of their own.

`bench_fused_decode.py [keys ...]` prints a line for each shape of heads and number of keys (KEYS if none is given). The
products run before and after attention as in a decode step, because with PDL a kernel begins while the
one before it ends. The time of the products alone is subtracted.
"""

import sys
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from blockyard.kernels.attention.fused_decode import SplitSemaphores, fused_decode
from blockyard.kernels.attention.paged_decode import paged_decode, schedule_decode
from blockyard.kernels.attention.score_rules import ScoreRules
from blockyard.kernels.kv_cache.paged_kv import PagedKVMetadata
from blockyard.kernels.kv_cache.rope_write_kv import rope_write_kv
from blockyard.kernels.layers.linear_skinny import linear_skinny
from blockyard.kernels.layers.rms_norm import RMSNorm
from blockyard.services.gpu_worker.bench.timing import CACHE_BYTES, graph_seconds

BLOCK_SIZE = 16
LONGEST = 8192  # as the graphs of decode steps are captured for
KEYS = (200, 1000, 2000, 4000)
DEVICE = "cuda"


@dataclass(frozen=True, slots=True)
class Shape:
    """A layer of a model."""

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    window: int | None = None
    has_norm: bool = True
    has_sinks: bool = False


SHAPES = (
    Shape("Gemma-3-4B", 8, 4, 256, 2560),
    Shape("Gemma-4-26B-A4B, window", 16, 8, 256, 2816, 1024),
    Shape("Gemma-4-26B-A4B", 16, 2, 512, 2816),
    Shape("Qwen3-30B-A3B", 32, 4, 128, 2048),
    Shape("Qwen3-0.6B", 16, 8, 128, 1024),
    Shape("gpt-oss-20b", 64, 8, 64, 2880, None, False, True),
)


class Chain:
    """Layers of a product, attention and a product."""

    def __init__(self, shape: Shape, keys: int) -> None:
        heads, kv_heads, head_dim, hidden = shape.heads, shape.kv_heads, shape.head_dim, shape.hidden
        self.shape, width = shape, (heads + 2 * kv_heads) * head_dim
        num = max(CACHE_BYTES // (2 * hidden * (width + heads * head_dim)), 1) + 1
        blocks = -(-keys // BLOCK_SIZE)
        tables = torch.zeros(1, LONGEST // BLOCK_SIZE, dtype=torch.int32, device=DEVICE)
        tables[0, :blocks] = torch.randperm(blocks, device=DEVICE)
        slots = torch.zeros(1, dtype=torch.int64, device=DEVICE)
        self.seqs = PagedKVMetadata(slots, slots + keys - 1, tables)
        self.layers = [_random(blocks, 2, kv_heads, BLOCK_SIZE, head_dim) for _ in range(num)]
        self.up = [_random(width, hidden) * hidden**-0.5 for _ in range(num)]
        self.down = [_random(hidden, heads * head_dim) * (heads * head_dim) ** -0.5 for _ in range(num)]
        angles = torch.rand(1, 1, head_dim // 2, device=DEVICE) * 6
        self.rotation = torch.polar(torch.ones_like(angles), angles)
        self.norm = RMSNorm(_random(heads + kv_heads, head_dim).abs() + 0.5, 1e-6) if shape.has_norm else None
        sinks = torch.randn(heads, device=DEVICE) if shape.has_sinks else None
        self.rules = ScoreRules(scale=head_dim**-0.5, window=shape.window, sinks=sinks)
        self.x, self.mixed = _random(1, hidden), _random(1, heads * head_dim)
        self.semaphores = SplitSemaphores(heads, torch.device(DEVICE))
        qkv = _random(1, heads + 2 * kv_heads, head_dim)
        self.schedule = schedule_decode(qkv[:, :heads], self.layers[0], self.seqs, self.rules, LONGEST)

    def attend(self, way: str, qkv: Tensor, layer: Tensor) -> Tensor:
        norm = self.norm
        if way == "none":
            return self.mixed
        if way == "fused":
            return fused_decode(qkv, layer, self.seqs, self.rotation, norm, self.rules, LONGEST, self.semaphores)
        rope_write_kv(qkv, layer, self.seqs, self.rotation, None if norm is None else norm.weight, 1e-6)
        q = qkv[:, : self.shape.heads]
        return paged_decode(q, layer, self.seqs, self.rules, LONGEST, schedule=self.schedule)

    def run(self, way: str) -> Tensor:
        x = self.x
        for up, down, layer in zip(self.up, self.down, self.layers, strict=True):
            qkv = _product(x, up).view(1, -1, self.shape.head_dim)
            x = _product(self.attend(way, qkv, layer), down)
        return x

    def layer_us(self, way: str) -> float:
        return 1e6 * graph_seconds([partial(self.run, way)]) / len(self.layers)


def _random(*size: int) -> Tensor:
    return torch.randn(size, device=DEVICE, dtype=torch.bfloat16)


def _product(x: Tensor, weight: Tensor) -> Tensor:
    return linear_skinny(x, weight, None, out_tile=8, tile=512, warps=4, early=2, pdl=True)


@torch.inference_mode()
def main(numbers: list[int]) -> None:
    print("| heads | keys | fused, us | kernels of their own, us |\n|---|---|---|---|")
    for shape in SHAPES:
        for keys in numbers or KEYS:
            chain = Chain(shape, keys)
            alone, fused, apart = (chain.layer_us(way) for way in ("none", "fused", "apart"))
            heads = f"{shape.heads} of {shape.head_dim} on {shape.kv_heads} ({shape.name})"
            print(f"| {heads} | {keys:,} | {fused - alone:.1f} | {apart - alone:.1f} |", flush=True)


if __name__ == "__main__":
    main([int(number) for number in sys.argv[1:]])
