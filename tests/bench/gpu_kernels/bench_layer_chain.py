"""Layers of Llama-3.1-8B's shape in a CUDA graph, as a decode step computes them: by the library's matrix products and
by `linear_stream_k`.

`bench_layer_chain.py [rows ...] [--context N] [--search]`. Weights and keys are random and larger than the L2 cache.
`--search`: tries tiles one product after the other.
"""

import argparse
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.errors import TritonError

from blockyard.kernels.attention.paged_decode import paged_decode, paged_decode_reference, schedule_decode
from blockyard.kernels.attention.score_rules import ScoreRules
from blockyard.kernels.attention.split_kv import SplitKVSchedule
from blockyard.kernels.kv_cache.paged_kv import PagedKVMetadata
from blockyard.kernels.kv_cache.rope_write_kv import rope_write_kv, rope_write_kv_reference
from blockyard.kernels.layers.act_mul import act_mul
from blockyard.kernels.layers.add_rms_norm import add_rms_norm
from blockyard.kernels.layers.linear_stream_k import Tiling, Workspace, linear_stream_k
from blockyard.kernels.layers.rms_norm import RMSNorm

HIDDEN, INNER, HEADS, KV_HEADS, DIM, BLOCK = 4096, 14336, 32, 8, 128, 16
SIZES = {"qkv": (6144, HIDDEN), "out": (HIDDEN, HIDDEN), "gate_up": (2 * INNER, HIDDEN), "down": (HIDDEN, INNER)}
LAYERS = 6
RULES = ScoreRules(scale=DIM**-0.5)
DEVICE = torch.device("cuda")

Tile = tuple[int, int, int, int, int, int, int]  # out_tile, row_tile, in_tile, stages, warps, split, fetch

# out_tile, row_tile, in_tile, stages, warps; splits
PLAIN = {
    16: {(64, 16, 128, 5, 4): (1, 2)},
    32: {(64, 32, 128, 5, 4): (1, 2)},
    64: {(64, 64, 128, 6, 4): (1, 2), (64, 64, 128, 3, 4): (1, 2, 4), (128, 64, 64, 8, 4): (1, 2, 4)},
    128: {(64, 128, 64, 8, 4): (1, 2), (128, 128, 64, 3, 4): (1, 2, 4), (64, 64, 128, 6, 4): (1, 2)},
    256: {(128, 256, 64, 4, 8): (1, 2), (128, 128, 64, 6, 8): (1, 2), (64, 256, 64, 5, 8): (1, 2)},
}
Way = dict[str, Tile | None]  # by product; None: the library's


class Chain:
    def __init__(self, rows: int, context: int, layers: int = LAYERS) -> None:
        blocks = -(-(context + 1) // BLOCK)
        tables = torch.randperm(rows * blocks, device=DEVICE).to(torch.int32).view(rows, blocks)
        positions = torch.full((rows,), context - 1, device=DEVICE, dtype=torch.int64)
        self.rows, self.context = rows, context
        self.seqs = PagedKVMetadata(torch.arange(rows, device=DEVICE), positions, tables)
        self.weights = [{name: _random(*size) * size[1] ** -0.5 for name, size in SIZES.items()} for _ in range(layers)]
        self.norms = [[RMSNorm(_random(HIDDEN).abs() + 0.5, 1e-5) for _ in range(2)] for _ in range(layers)]
        self.kv = [_random(rows * blocks, 2, KV_HEADS, BLOCK, DIM) for _ in range(layers)]
        self.start = _random(rows, HIDDEN)
        angles = torch.rand(rows, 1, DIM // 2, device=DEVICE) * 6
        self.rotation = torch.polar(torch.ones_like(angles), angles)
        self.workspace = Workspace(6 << 20, 1 << 14, DEVICE)

    def run(self, way: Way) -> Tensor:
        residual, delta = self.start.clone(), None
        schedule = schedule_decode(
            residual.view(self.rows, HEADS, DIM), self.kv[0], self.seqs, RULES, self.context + 64
        )
        for weights, norms, kv in zip(self.weights, self.norms, self.kv, strict=True):
            qkv = self._product(way, "qkv", weights, add_rms_norm(residual, delta, norms[0].weight, norms[0].eps))
            mixed = self._attend(qkv.view(self.rows, -1, DIM), kv, schedule)
            delta = self._product(way, "out", weights, mixed)
            x = add_rms_norm(residual, delta, norms[1].weight, norms[1].eps)
            gated = self._product(way, "gate_up", weights, x)
            delta = self._product(way, "down", weights, act_mul(gated))
        assert delta is not None
        return residual + delta

    def _product(self, way: Way, name: str, weights: dict[str, Tensor], x: Tensor) -> Tensor:
        tile = way[name]
        if tile is None:
            return F.linear(x, weights[name])
        out, row, size, stages, warps, split, fetch = tile
        tiling = Tiling(out, row, size, stages, warps, True, fetch)
        return linear_stream_k(x, weights[name], None, tiling, self.workspace, split)

    def _attend(self, qkv: Tensor, kv: Tensor, schedule: SplitKVSchedule) -> Tensor:
        rope_write_kv(qkv, kv, self.seqs, self.rotation, None, 0.0)
        return paged_decode(qkv[:, :HEADS], kv, self.seqs, RULES, self.context + 64, schedule=schedule)

    def reference(self) -> Tensor:
        residual = self.start.double()
        for weights, norms, kv in zip(self.weights, self.norms, self.kv, strict=True):
            x = _normed(norms[0], residual)
            qkv = (x @ weights["qkv"].double().T).view(self.rows, -1, DIM)
            known = kv.double()
            rope_write_kv_reference(qkv, known, self.seqs, self.rotation, None, 0.0)
            mixed = paged_decode_reference(qkv[:, :HEADS], known, self.seqs, RULES)
            residual = residual + mixed @ weights["out"].double().T
            gate, up = (_normed(norms[1], residual) @ weights["gate_up"].double().T).chunk(2, -1)
            residual = residual + (F.silu(gate) * up) @ weights["down"].double().T
        return residual


def _random(*size: int) -> Tensor:
    return torch.randn(size, device=DEVICE, dtype=torch.bfloat16)


def _normed(norm: RMSNorm, x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps) * norm.weight.double()


def replay_us(step: Callable[[], object], repeats: int = 7, times: int = 3) -> float:
    """Median time of the whole step."""
    graph = torch.cuda.CUDAGraph()
    step()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        step()
    graph.replay()
    took = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(times):
            graph.replay()
        end.record()
        end.synchronize()
        took.append(1e3 * start.elapsed_time(end) / times)
    return sorted(took)[len(took) // 2]


def candidates(rows: int, name: str) -> list[Tile | None]:
    tiles: list[Tile | None] = [None]
    for shape, splits in PLAIN[rows].items():
        count = -(-SIZES[name][0] // shape[0]) * -(-rows // shape[1])
        tiles += [(*shape, split, 4) for split in splits if count * split <= 300 or split == 1]
    return tiles


def search(chain: Chain, way: Way) -> None:
    took = replay_us(lambda: chain.run(way))
    for name in ("gate_up", "down", "out", "qkv"):
        tiles = candidates(chain.rows, name)
        current = way[name]
        if current is not None:
            tiles += [(*current[:6], fetch) for fetch in (0, 8, 16)]
        for tile in tiles:
            other = {**way, name: tile}
            try:
                us = replay_us(lambda other=other: chain.run(other), 5, 2)
            except TritonError as e:  # out of resources
                print(f"   {name} {tile}: {str(e).splitlines()[0][:80]}", flush=True)
                continue
            print(f"   {name} {tile}: {us / LAYERS:.1f}", flush=True)
            if us < 0.998 * took:
                took, way = us, other
    print(f"{chain.rows} rows at {chain.context}, searched: {took / LAYERS:.1f} us a layer\n  {way}", flush=True)


def compile_all(chain: Chain, ways: Sequence[Way]) -> None:
    """Compiles in parallel; compile errors appear when a candidate is timed."""

    def one(way: Way) -> None:
        try:
            with torch.inference_mode():
                chain.run(way)
        except TritonError as e:
            print("   not compiled:", way, str(e).splitlines()[0][:100], flush=True)

    with ThreadPoolExecutor(16) as threads:
        list(threads.map(one, ways))
    torch.cuda.synchronize()


def start_tiles(rows: int) -> dict[str, Tile | None]:
    shape = next(iter(PLAIN[rows]))
    split = 2 if rows < 256 else 1
    return {"qkv": (*shape, 1, 4), "out": (*shape, split, 4), "gate_up": (*shape, 1, 0), "down": (*shape, split, 4)}


def ways_of(rows: int) -> dict[str, Way]:
    return {"tiles": start_tiles(rows), "library": dict.fromkeys(SIZES)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("rows", type=int, nargs="*", default=[64])
    parser.add_argument("--context", type=int, default=1100)
    parser.add_argument("--search", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    with torch.inference_mode():
        for rows in args.rows:
            one_size(rows, args.context)
        for rows in args.rows if args.search else ():
            way = ways_of(rows)["library" if rows >= 256 else "tiles"]
            tried = [{**way, n: t} for n in SIZES for t in candidates(rows, n)]
            compile_all(Chain(rows, 64, 1), tried)
            search(Chain(rows, args.context), way)


def one_size(rows: int, context: int) -> None:
    ways, small = ways_of(rows), Chain(rows, 200, 2)
    compile_all(small, list(ways.values()))
    start, want = small.start.double(), small.reference()
    for name, way in ways.items():
        error = float((small.run(way).double() - want).norm() / (want - start).norm())
        print(f"{rows} rows, {name}: {error:.2e} of what two layers add", flush=True)
    del small
    chain = Chain(rows, context)
    for name, way in [*ways.items(), *ways.items()]:
        print(f"{rows} rows at {context}, {name}: {replay_us(lambda way=way: chain.run(way)) / LAYERS:.1f} us a layer",
              flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
