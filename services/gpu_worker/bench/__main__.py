"""`blockyard bench kernels [FAMILY ...]`: times the kernels of each family on the GPU and prints one table."""

import sys
from collections.abc import Callable

import torch

from blockyard.services.gpu_worker.bench.row import Row, ceilings
from blockyard.shared.process import pipes

FAMILIES = (  # one module for each
    "adapters",
    "attention",
    "experts",
    "latent",
    "linear",
    "linear_8_bits",
    "linear_weight_only",
    "quantized_experts",
    "sampling",
    "small",
)
MEASURES: dict[str, Callable[[], list[Row]]] = {}  # by family

if torch.cuda.is_available():
    # they import Triton, which comes only with CUDA builds of torch
    from blockyard.services.gpu_worker.bench import (
        adapters,
        attention,
        experts,
        latent,
        linear,
        linear_8_bits,
        linear_weight_only,
        quantized_experts,
        sampling,
        small,
    )

    _MODULES = (
        adapters,
        attention,
        experts,
        latent,
        linear,
        linear_8_bits,
        linear_weight_only,
        quantized_experts,
        sampling,
        small,
    )
    MEASURES = {name: module.measure for name, module in zip(FAMILIES, _MODULES, strict=True)}


def main(names: list[str]) -> int:
    unknown = [name for name in names if name not in FAMILIES]
    if unknown:
        print(f"{unknown[0]}: no such family of kernels; there is {', '.join(FAMILIES)}", file=sys.stderr)
        return 2
    if not torch.cuda.is_available():
        print("blockyard bench kernels: torch sees no GPU on this machine, and the kernels run on one", file=sys.stderr)
        return 2
    most = ceilings()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    fp8 = "" if most.fp8_flop_per_s is None else f", fp8 GEMM {most.fp8_flop_per_s / 1e12:,.0f} TFLOP/s"
    print(
        f"read {most.read_bytes_per_s / 1e12:.2f} TB/s, copy {most.copy_bytes_per_s / 1e12:.2f} TB/s,"
        f" bf16 GEMM {most.bf16_flop_per_s / 1e12:,.0f} TFLOP/s{fp8},"
        f" tiny kernel in a graph {1e6 * most.launch_s:.2f} us\n"
    )
    print("| kernel | shape | us | rate | share of the ceiling |\n|---|---|---|---|---|")
    for name in names or FAMILIES:
        for one in MEASURES[name]():
            cells = (one.name, one.shape, f"{one.us:,.1f}", one.rate, f"{one.ceiling_share:.1%}")
            print("| " + " | ".join(cells) + " |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(pipes.exit_code_of(lambda: main(sys.argv[1:])))
