"""Times layers of experts with quantized weights against the same layers in bfloat16, each with its fastest config.

Layers are as in Qwen3-30B-A3B, gpt-oss-20b and DeepSeek-V3, with dummy weights and even routing. `measure` gives the
rows of the kernel table; `compare` prints the time of each form divided by that of bfloat16.
"""

import argparse
import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from blockyard.kernels.moe.gates import Gate
from blockyard.kernels.moe.routing import Routing
from blockyard.services.gpu_worker.bench.row import Row, row
from blockyard.services.gpu_worker.bench.timing import DEVICE, copies
from blockyard.services.gpu_worker.layers.moe.expert_configs import ExpertConfig, candidates
from blockyard.services.gpu_worker.layers.moe.expert_weights import ExpertWeights
from blockyard.services.gpu_worker.layers.moe.grouped_experts import GroupedExperts
from blockyard.services.gpu_worker.linear_tuning.expert_tuner import ExpertTuner
from blockyard.services.gpu_worker.quantization.dense import UnquantizedExperts
from blockyard.services.gpu_worker.quantization.kept.form import KeptExperts, KeptForm, kinds
from blockyard.services.gpu_worker.quantization.kept.fp8_w8a8 import Fp8W8A8
from blockyard.services.gpu_worker.quantization.kept.table4_a16 import E2M1, Table4A16
from blockyard.services.gpu_worker.quantization.kept.w4a16 import W4A16
from blockyard.services.gpu_worker.quantization.method import ExpertMethod

DTYPE = torch.bfloat16
ROWS = (1, 8, 64)
COMPARED_ROWS = (1, 8, 64, 2048)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLayer:
    name: str
    num_experts: int
    top_k: int
    hidden: int
    inner: int
    gate: Gate = Gate.SILU
    bias: bool = False


QWEN3_30B = ExpertLayer(name="Qwen3-30B-A3B", num_experts=128, top_k=8, hidden=2048, inner=768)
GPT_OSS_20B = ExpertLayer(
    name="gpt-oss-20b", num_experts=32, top_k=4, hidden=2880, inner=2880, gate=Gate.CLAMPED_SWIGLU, bias=True
)
DEEPSEEK_V3 = ExpertLayer(name="DeepSeek-V3", num_experts=256, top_k=8, hidden=7168, inner=2048)
CASES: tuple[tuple[str, ExpertLayer, KeptForm], ...] = (
    ("fp8", QWEN3_30B, Fp8W8A8()),
    ("W4, groups of 128", QWEN3_30B, W4A16(128)),
    ("mxfp4", GPT_OSS_20B, Table4A16(E2M1, 32, torch.float8_e8m0fnu)),
    ("block fp8", DEEPSEEK_V3, Fp8W8A8(128)),
)


def measure() -> list[Row]:
    rows = []
    for name, layer, form in CASES:
        for num, seconds, _ in _timed(layer, form, ROWS):
            hit = _hit(layer, num)
            num_bytes = round(hit / layer.num_experts * _size_bytes(layer, form)) + 4 * num * layer.hidden
            operations = 6 * num * layer.top_k * layer.hidden * layer.inner
            shape = f"{layer.name}, {num} rows, {hit:.0f} experts hit"
            rows.append(row(f"experts in {name}", shape, seconds, num_bytes, operations))
    return rows


def compare(cases: Sequence[tuple[str, ExpertLayer, KeptForm]], rows: Sequence[int]) -> None:
    """Prints microseconds of both and their quotient, with the configs."""
    for name, layer, form in cases:
        dense = {num: seconds for num, seconds, _ in _timed(layer, None, rows)}
        for num, seconds, config in _timed(layer, form, rows):
            print(
                f"{layer.name:14} {name:18} {num:5} rows: {dense[num] * 1e6:8.1f} -> {seconds * 1e6:8.1f} us"
                f" = {seconds / dense[num]:.2f}  {config.kernel} {config.tile} {config.gate_up} {config.down}",
                flush=True,
            )


def compile_all(case: tuple[str, ExpertLayer, KeptForm], rows: int) -> None:
    """Launches all candidates once, so that Triton's cache has them."""
    _, layer, form = case
    with torch.inference_mode(), torch.device(DEVICE):
        ExpertTuner([_make(layer, form)]).launch_candidates(rows)
        torch.cuda.synchronize()


def _timed(layer: ExpertLayer, form: KeptForm | None, rows: Sequence[int]) -> Iterator[tuple[int, float, ExpertConfig]]:
    """Numbers of rows, seconds with the fastest config, and that config."""
    read_bytes = round(_hit(layer, min(rows)) / layer.num_experts * _size_bytes(layer, form))
    with torch.inference_mode(), torch.device(DEVICE):
        layers = [_make(layer, form) for _ in range(copies(read_bytes))]
        tuner = ExpertTuner(layers)
        [shape] = tuner.shapes
        for num in rows:
            times = {config: tuner.seconds(config, shape, num) for config in candidates(shape, num)}
            best = min(times, key=lambda config: times[config])
            yield num, times[best], best
    del layers, tuner
    gc.collect()
    torch.cuda.empty_cache()


def _hit(layer: ExpertLayer, rows: int) -> float:
    """Experts that even routing of so many rows chooses, on average."""
    return layer.num_experts * (1 - (1 - layer.top_k / layer.num_experts) ** rows)


def _size_bytes(layer: ExpertLayer, form: KeptForm | None) -> int:
    sizes = ((2 * layer.inner, layer.hidden), (layer.hidden, layer.inner))
    if form is None:
        return sum(2 * layer.num_experts * outs * size for outs, size in sizes)
    return sum(
        torch.empty(shape, dtype=dtype, device="meta").nbytes
        for outs, size in sizes
        for shape, dtype in kinds(form, outs, size, (layer.num_experts,)).values()
    )


def _make(layer: ExpertLayer, form: KeptForm | None) -> GroupedExperts:
    methods = [
        _method(layer, form, outs, size)
        for outs, size in ((2 * layer.inner, layer.hidden), (layer.hidden, layer.inner))
    ]
    weights = ExpertWeights(gate_up=methods[0], down=methods[1], device=torch.device(DEVICE))
    routing = Routing(num_experts=layer.num_experts, top_k=layer.top_k)
    return GroupedExperts(weights, routing, layer.gate, scales_input=False)


def _method(layer: ExpertLayer, form: KeptForm | None, outs: int, size: int) -> ExpertMethod:
    bias = torch.zeros(layer.num_experts, outs, dtype=DTYPE) if layer.bias else None
    if form is None:
        weight = torch.empty(layer.num_experts, outs, size, dtype=DTYPE).normal_(0.0, 0.02)
        return UnquantizedExperts(weight, bias)
    kept: dict[str, Tensor] = {
        name: torch.empty(shape, dtype=dtype)
        for name, (shape, dtype) in kinds(form, outs, size, (layer.num_experts,)).items()
    }
    form.fill(kept, torch.Generator(DEVICE).manual_seed(1))
    return KeptExperts(form, kept, (size, outs), DTYPE, bias)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", type=int, choices=range(len(CASES)), help="only this one")
    parser.add_argument("--rows", type=int, nargs="+", default=COMPARED_ROWS)
    parser.add_argument("--compile", action="store_true", help="compile all kernels and measure nothing")
    options = parser.parse_args()
    cases = CASES if options.case is None else CASES[options.case : options.case + 1]
    if options.compile:
        for case in cases:
            for rows in options.rows:
                compile_all(case, rows)
    else:
        compare(cases, options.rows)


if __name__ == "__main__":
    main()
