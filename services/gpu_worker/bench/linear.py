"""Linear layers of decode steps: each shape of Llama-3.1-8B, in cuBLAS and as picked."""

import torch

from blockyard.services.gpu_worker.bench.row import Row, row
from blockyard.services.gpu_worker.linear import Linear
from blockyard.services.gpu_worker.linear_picker import LIBRARY
from blockyard.services.gpu_worker.linear_tuning import Tuner

SHAPES = {
    "qkv": (6144, 4096),
    "out": (4096, 4096),
    "gate and up": (28672, 4096),
    "down": (4096, 14336),
    "head": (128256, 4096),
}
ROWS = (1, 8, 64, 128, 256)
WEIGHT_BYTES = 400 << 20  # of each shape: several times the L2 cache


def measure() -> list[Row]:
    """A norm runs before each product, as in a step, and is in its time."""
    with torch.inference_mode():
        tuner = Tuner([linear for shape in SHAPES.values() for linear in _linears(*shape)])
        rows = []
        for num in ROWS:
            plans = tuner.measure(num)
            for name, layer, plan, group in zip(SHAPES, tuner.layers, plans, tuner.groups, strict=True):
                shape = f"{num} x {layer.ins} -> {layer.outs}"
                read, operations = 2 * layer.ins * layer.outs, 2 * num * layer.ins * layer.outs
                rows.append(row(f"{name}, cuBLAS", shape, tuner.seconds(LIBRARY, group, num), read, operations))
                if plan != LIBRARY:
                    rows.append(row(f"{name}, ours", shape, tuner.seconds(plan, group, num), read, operations))
    return rows


def _linears(outs: int, ins: int) -> list[Linear]:
    count = max(WEIGHT_BYTES // (2 * ins * outs), 1)
    return [Linear(torch.randn(outs, ins, dtype=torch.bfloat16, device="cuda") * 0.02) for _ in range(count)]
