"""The equality matrix at length, by hand: greedy and seeded outputs under every condition, in float32.

`python tests/bench/scheduling/bench_equality.py [TOKENS] [--batch-invariant] [--device cuda] [--model qwen3-moe]
[--model-impl transformers]`
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

import torch

TESTS = Path(__file__).parents[2]
sys.path += [str(TESTS / "support"), str(TESTS / "bench"), str(TESTS / "support" / "models")]

from equality import CONDITIONS, Bench, requests  # noqa: E402 -- found by the line above
from rig import Row  # noqa: E402
from ties import Ties  # noqa: E402

COUNT = 24  # requests of a round
MAX_TOKENS = 60


def measure(
    num_tokens: int, batch_invariant: bool, device: str = "cpu", model: str = "llama", model_impl: str = "auto"
) -> dict[str, Ties]:
    """Runs rounds of requests until this many tokens were compared. Returns results by condition."""
    torch.set_num_threads(1)
    round_, ties = 0, {name: Ties() for name in CONDITIONS}
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), batch_invariant, device, model, model_impl)
        while sum(t.tokens for t in ties.values()) < num_tokens:
            asked = requests(COUNT, MAX_TOKENS, first=round_ * COUNT)
            expected = bench.alone(asked)
            for name, condition in CONDITIONS.items():
                bench.compare(name, asked, expected, condition(bench, asked), ties[name])
            round_ += 1
    return ties


def all_of(ties: dict[str, Ties]) -> Ties:
    total = Ties()
    total.tokens = sum(t.tokens for t in ties.values())
    total.ties = [tie for t in ties.values() for tie in t.ties]
    return total


def equality_rows(num_tokens: int = 20_000) -> list[Row]:
    """For the scheduling table."""
    rows: list[Row] = []
    for batch_invariant, bar in ((False, "1 in 100,000"), (True, "none")):
        found = all_of(measure(num_tokens, batch_invariant))
        what = f"ties under {len(CONDITIONS)} conditions, fp32{', --batch-invariant' if batch_invariant else ''}"
        rows.append((what, f"{len(found.ties)} in {found.tokens:,} equal tokens", bar))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokens", type=int, nargs="?", default=200_000)
    parser.add_argument("--batch-invariant", action="store_true")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--model", default="llama", help="a name in tiny_models.py")
    parser.add_argument("--model-impl", choices=["auto", "transformers"], default="auto")
    args = parser.parse_args()
    began = time.monotonic()
    ties = measure(args.tokens, args.batch_invariant, args.device, args.model, args.model_impl)
    how = ", batch-invariant" if args.batch_invariant else ""
    print(f"{args.model}, {args.model_impl}, float32, {args.device}{how}, {time.monotonic() - began:.0f} s")
    for name, found in ties.items():
        print(f"{name:24} {found.tokens:9,} equal tokens, {len(found.ties)} ties {' '.join(found.ties)}")
    print(all_of(ties).check())


if __name__ == "__main__":
    main()
