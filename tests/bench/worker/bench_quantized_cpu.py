"""One stream of Qwen3-0.6B's shape on the CPU, in bfloat16 and with weights of 8 and 4 bits: milliseconds a token.

    PYTHONPATH=.src python -P tests/bench/worker/bench_quantized_cpu.py [--threads 2] [--tokens 16] [--rounds 7]

Dummy weights; the head, which is the embedding, is in bfloat16 in all. The models take turns, so that other load of the
machine meets all of them. CPU time is of all threads of the process, and counts the waits of one thread for another.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SUPPORT = Path(__file__).parents[2] / "support"
sys.path[:0] = [str(SUPPORT), str(SUPPORT / "models")]

from plan_driver import Driver  # noqa: E402 -- found by the line above
from tiny_models import start  # noqa: E402

from blockyard.services.bench.suite import shapes  # noqa: E402
from blockyard.services.gpu_worker.runner import Runner  # noqa: E402
from blockyard.shared.messages import Sampling  # noqa: E402

WHOLE_ROWS = {"bits": 8, "group_size": -1, "sym": True}
KINDS: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "8 bits, scales of rows": {"quant_method": "gptq", **WHOLE_ROWS},
    "4 bits, groups of 128": {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": False},
}


def begin(folder: Path, said: dict[str, Any], threads: int) -> Runner:
    overrides = json.dumps({"quantization_config": said}) if said else "{}"
    return start(
        folder,
        load_format="dummy",
        dtype="bfloat16",
        threads=threads,
        max_model_len=256,
        num_gpu_blocks_override=64,
        max_num_seqs=1,
        config_overrides=overrides,
    )


def seconds_of(runner: Runner, tokens: int) -> tuple[float, float]:
    """Wall and CPU seconds a token of a stream with a short prompt."""
    driver = Driver(runner, num_slots=1)
    driver.add([5, 9, 3, 7], Sampling(max_tokens=tokens + 1, temperature=0.0, ignore_eos=True))
    wall, cpu = time.perf_counter(), time.process_time()
    driver.run()
    return (time.perf_counter() - wall) / (tokens + 1), (time.process_time() - cpu) / (tokens + 1)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (("threads", 2), ("tokens", 16), ("rounds", 7)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root)
        (folder / "config.json").write_text(json.dumps(shapes.read("qwen3-0.6b")))
        runners = {kind: begin(folder, said, given.threads) for kind, said in KINDS.items()}
    taken: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    for _ in range(given.rounds + 1):
        for kind, runner in runners.items():
            taken[kind].append(seconds_of(runner, given.tokens))
    print("| weights | wall ms a token | CPU ms a token | speed to bfloat16 by wall, by CPU time |\n|---|---|---|---|")
    walls, cpus = ({kind: [one[i] for one in some[1:]] for kind, some in taken.items()} for i in (0, 1))
    for kind in KINDS:
        wall, cpu = (statistics.median(some[kind]) * 1000 for some in (walls, cpus))
        gains = [
            statistics.median(a / b for a, b in zip(some["bfloat16"], some[kind], strict=True))
            for some in (walls, cpus)
        ]
        print(f"| {kind} | {wall:.1f} | {cpu:.1f} | {gains[0]:.2f}, {gains[1]:.2f} |")


if __name__ == "__main__":
    main()
