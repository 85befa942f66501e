"""Times the linear layers of Llama-3.1-8B decode steps, with cuBLAS and as tuned: each shape, and a whole step."""

from collections.abc import Iterator

import torch

from blockyard.services.gpu_worker.bench.row import Row, row
from blockyard.services.gpu_worker.layers.linear import Linear, dense_linear
from blockyard.services.gpu_worker.linear_tuning.kernel_configs import CUBLAS, LinearShape
from blockyard.services.gpu_worker.linear_tuning.tuner import Tuner

SHAPES = {
    "qkv": (6144, 4096),
    "out": (4096, 4096),
    "gate and up": (28672, 4096),
    "down": (4096, 14336),
}
HEAD = (128256, 4096)
LAYERS = 32
NAMES = {"cublas": "cuBLAS", "skinny": "rows in registers", "stream_k": "tensor cores"}
ROWS = (1, 8, 64, 128, 256)


def measure() -> list[Row]:
    """Times all shapes and steps, with 15 GB of weights. Shapes include the norm before each product; steps do not."""
    with torch.inference_mode():
        linears = [_linear(*shape) for _ in range(LAYERS) for shape in SHAPES.values()]
        tuner = Tuner([*linears, _linear(*HEAD)], device=torch.device("cuda"), dtype=torch.bfloat16)
        tuner.compile(ROWS)
        return [one for num in ROWS for one in _rows(tuner, num)]


def _rows(tuner: Tuner, num: int) -> Iterator[Row]:
    picked, cublas = tuner.measure(num), [CUBLAS] * len(tuner.layers)
    for name, layer, config, group in zip((*SHAPES, "head"), tuner.layers, picked, tuner.groups, strict=True):
        shape = f"{num} x {layer.in_features} -> {layer.out_features}"
        for one in dict.fromkeys((CUBLAS, config)):
            seconds = tuner.timer.seconds(one, group, num)
            yield row(f"{name}, {NAMES[one.kernel]}", shape, seconds, *_work([layer], num, layer.count))
    for label, configs in (("cuBLAS", cublas), ("as picked", picked)):
        seconds = tuner.timer.step_seconds(configs, num, norms=False)
        yield row(f"all of a step, {label}", f"{num} rows", seconds, *_work(tuner.layers, num))


def _work(layers: list[LinearShape], num: int, share: int = 1) -> tuple[float, float]:
    """Returns the bytes of weights and the number of operations."""
    elements = sum(layer.in_features * layer.out_features * layer.count for layer in layers) / share
    return 2 * elements, 2 * num * elements


def _linear(out_features: int, in_features: int) -> Linear:
    return dense_linear(torch.randn(out_features, in_features, dtype=torch.bfloat16, device="cuda").mul_(0.02))
