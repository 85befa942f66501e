"""`blockyard bench kernels [FAMILY ...]`: measures the families of kernels in this folder on the GPU, one table."""

import importlib
import pkgutil
import sys
from pathlib import Path

import torch

from blockyard.services.gpu_worker.bench.row import Row, ceilings
from blockyard.shared.process import pipes

NO_FAMILIES = ("__main__", "row", "timing")


def main(names: list[str]) -> int:
    families = sorted(m.name for m in pkgutil.iter_modules([str(Path(__file__).parent)]) if m.name not in NO_FAMILIES)
    unknown = [name for name in names if name not in families]
    if unknown:
        print(f"{unknown[0]}: no such family of kernels; there is {', '.join(families)}", file=sys.stderr)
        return 2
    if not torch.cuda.is_available():
        print("blockyard bench kernels: torch sees no GPU on this machine, and the kernels run on one", file=sys.stderr)
        return 2
    most = ceilings()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(
        f"read {most.read_bytes_per_s / 1e12:.2f} TB/s, copy {most.copy_bytes_per_s / 1e12:.2f} TB/s,"
        f" bf16 GEMM {most.bf16_flop_per_s / 1e12:,.0f} TFLOP/s, tiny kernel in a graph {1e6 * most.launch_s:.2f} us\n"
    )
    print("| kernel | shape | us | rate | share of the ceiling |\n|---|---|---|---|---|")
    for name in names or families:
        rows: list[Row] = importlib.import_module(f"blockyard.services.gpu_worker.bench.{name}").measure()
        for one in rows:
            cells = (one.name, one.shape, f"{one.us:,.1f}", one.rate, f"{one.ceiling_share:.1%}")
            print("| " + " | ".join(cells) + " |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(pipes.to_its_end(lambda: main(sys.argv[1:])))
