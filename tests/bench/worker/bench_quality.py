"""Bits per byte of the demo model's held-out text with each scheme of quantized weights, beside a simulation.

    PYTHONPATH=.src python -P tests/bench/worker/bench_quality.py

Percent above the model that is not quantized. A minute or two on the CPU.
"""

import sys
import tempfile
from pathlib import Path

SUPPORT = Path(__file__).parents[2] / "support"
sys.path[:0] = [str(SUPPORT), str(SUPPORT / "models"), str(SUPPORT / "formats")]

from quality import SCHEMES, Text, of_worker, simulated  # noqa: E402 -- found by the line above


def main() -> None:
    text = Text()
    plain = simulated(text, None)
    in_32, in_16 = (of_worker(text, None, Path(), dtype)[0] for dtype in ("float32", "bfloat16"))
    print(f"16 bits: {plain:.4f} bits per byte; the worker in float32 {in_32:.4f}, in bfloat16 {in_16:.4f}\n")
    print("| percent above 16 bits | simulated | worker, float32 | worker, bfloat16 |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as root:
        for name, scheme in SCHEMES.items():
            folder = Path(root) / name
            found = [
                simulated(text, scheme),
                *(of_worker(text, scheme, folder, one) for one in ("float32", "bfloat16")),
            ]
            print(f"| {name} | " + " | ".join(f"{100 * (one / plain - 1):.2f}" for one in found) + " |", flush=True)


if __name__ == "__main__":
    main()
