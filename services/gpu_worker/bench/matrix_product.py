"""Prints the rate of this GPU's bf16 matrix product of 8,192 cubed in FLOP/s, for figures relative to it."""

import sys

import torch

from blockyard.services.gpu_worker.bench.row import ceilings


def main() -> int:
    if not torch.cuda.is_available():
        print("torch sees no GPU on this machine", file=sys.stderr)
        return 2
    print(ceilings().bf16_flop_per_s)
    return 0


if __name__ == "__main__":
    sys.exit(main())
