"""Compares a worker of several ranks, which may share one GPU, with a worker of one rank: tokens and log-probabilities.

`check_ranks_on_one_gpu.py [--device cuda] [--jobs 3] [--each 60] [--limit 220] [--logs FOLDER] [NAME ...]`

It starts a ring for each layout of each tiny checkpoint, all in float32, and prints a line for each: what differs, or
how much. On a machine with fewer GPUs than ranks all ranks are on the first GPU. Kernels carry the collectives of two
such ranks, also in CUDA graphs, and the host those of more. One case takes --each seconds at most, and none is begun
after --limit. NAME: a part of a case's name.
"""

import argparse
import json
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

HERE = Path(__file__).parent
TESTS = HERE.parents[1]
SRC = TESTS.parent / ".src"
sys.path += [str(SRC), str(HERE), str(TESTS / "bench"), str(TESTS / "support"), str(TESTS / "support" / "models")]

from limited_process import run_limited  # noqa: E402 -- found by the line above
from rank_answers import Stream  # noqa: E402
from tiny_models import BY_NAME  # noqa: E402

from blockyard.services.launcher.executors import count_gpus  # noqa: E402

DEMO = TESTS.parent / "shared" / "demo_model"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
VOCAB = 4096  # of the tokenizer
TOLERANCE = 1e-4  # of log-probabilities
TIE = 1e-3  # greedy tokens whose log-probabilities are as close may change places
FIRST_S = 45.0  # more for a worker of one rank: it compiles kernels that others find compiled
ALONE = "one rank"
LAYOUTS: dict[str, dict[str, object]] = {
    "tp 2": {"tensor_parallel_size": 2},
    "tp 2, eager": {"tensor_parallel_size": 2, "enforce_eager": True},
    "tp 2, sums by transport": {"tensor_parallel_size": 2, "disable_custom_all_reduce": True},
    "tp 2, invariant": {"tensor_parallel_size": 2, "batch_invariant": True},
    "tp 2, experts": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    "tp 2, experts move": {
        "tensor_parallel_size": 2,
        "enable_expert_parallel": True,
        "enable_eplb": True,
        "eplb_config": {"step_interval": 20, "window_size": 20, "log_balancedness": True},
    },
    "pp 2": {"pipeline_parallel_size": 2},
    "tp 2, killed": {"tensor_parallel_size": 2},
    "pp 2, killed": {"pipeline_parallel_size": 2},
    "tp 2, pp 2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    "tp 3": {"tensor_parallel_size": 3},
}
MORE_OF_LLAMA = ("tp 3", "tp 2, pp 2", "tp 2, eager", "tp 2, sums by transport", "tp 2, invariant")
MODELS = {
    "llama": ("tp 2", "pp 2", "tp 2, killed", "pp 2, killed", *MORE_OF_LLAMA),
    "mixtral": ("tp 2", "tp 2, experts", "tp 2, experts move", "pp 2"),
    "deepseek-v3": ("tp 2", "pp 2", "tp 2, experts"),
    "demo": ("tp 2", "pp 2"),
}
PARTS = {ALONE: "sleeps kills", "tp 2": "sleeps", "pp 2": "sleeps", "tp 2, killed": "kills", "pp 2, killed": "kills"}
# lines of a log that are shown
NOTES = ("rank 1 is killed", "ready after", "ranks share", "ranks exchange", "sums of ranks", "CUDA graphs")


@dataclass(frozen=True, slots=True)
class Case:
    model: str
    layout: str

    @property
    def flags(self) -> dict[str, object]:
        return LAYOUTS.get(self.layout, {})

    @property
    def parts(self) -> str:
        """See `rank_answers`. They take as long as other starts, so that few cases have them."""
        return PARTS.get(self.layout, "") if self.model == "llama" else ""

    @property
    def num_ranks(self) -> int:
        sizes = [size for flag, size in self.flags.items() if flag.endswith("_parallel_size")]
        return math.prod(size for size in sizes if isinstance(size, int))

    @property
    def file_name(self) -> str:
        return str(self).replace(", ", "-").replace(" ", "")

    def __str__(self) -> str:
        return f"{self.model}, {self.layout}"


@dataclass(frozen=True, slots=True)
class Bench:
    folder: Path
    logs: Path
    device: str
    each_s: float
    ends: float  # by the monotonic clock

    def model(self, name: str) -> Path:
        return self.folder / name

    def run(self, case: Case) -> list[Stream] | str:
        """Returns the answers, or why there are none."""
        left_s = self.ends - time.monotonic()
        if left_s < 5:
            return "not run, out of time"
        most_s = min(self.each_s + (FIRST_S if case.layout == ALONE else 0), left_s)
        output, log = self.folder / f"{case.file_name}.json", self.log(case)
        command = [sys.executable, "-P", str(HERE / "rank_answers.py"), str(self.model(case.model)), str(output)]
        with log.open("wb") as file:
            env = {**os.environ, "PYTHONPATH": _path(), **self._gpus(case.num_ranks)}
            asked = [*command, self.device, json.dumps(case.flags), case.parts]
            code = run_limited(asked, most_s, env=env, stdout=file, stderr=file)
        if code is None:
            return f"killed after {most_s:.0f} s\n{_tail(log)}"
        if code:
            return f"ended with {code}\n{_tail(log)}"
        return msgspec.json.decode(output.read_bytes(), type=list[Stream])

    def notes(self, case: Case) -> list[str]:
        """Returns what the leader has said of ranks and graphs."""
        lines = (line.split("gpu_worker: ")[-1] for line in self.log(case).read_text("utf-8", "replace").splitlines())
        return list(dict.fromkeys(line for line in lines if line.startswith(NOTES)))

    def log(self, case: Case) -> Path:
        return self.logs / f"{case.file_name}.log"

    def _gpus(self, num_ranks: int) -> dict[str, str]:
        """Returns the variable that gives ranks the same GPU, where they are more than there are."""
        if self.device != "cuda" or num_ranks <= count_gpus(os.environ):
            return {}
        first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        return {"CUDA_VISIBLE_DEVICES": ",".join([first] * num_ranks)}


def _path() -> str:
    given = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    return os.pathsep.join([str(SRC), str(TESTS / "bench"), *given])


def _tail(log: Path) -> str:
    return "\n".join(f"    {line}" for line in log.read_text("utf-8", "replace").splitlines()[-12:])


def differences(expected: Sequence[Stream], found: Sequence[Stream]) -> Iterator[str]:
    """Yields a line for each stream that differs by more than rounding."""
    for one, other in pairs(expected, found):
        at = first_difference(one, other)
        if at is not None and (at >= len(one.gaps) or one.gaps[at] > TIE or one.name.startswith("seeded")):
            yield f"{one.name}: token {at} is {other.tokens[at : at + 1]} and not {one.tokens[at : at + 1]}"
        elif (most := distance(one, other)) > TOLERANCE:
            yield f"{one.name}: log-probabilities differ by {most:.2g}"


def pairs(expected: Sequence[Stream], found: Sequence[Stream]) -> list[tuple[Stream, Stream]]:
    """Returns each stream beside that of one rank."""
    by_name = {one.name: one for one in expected}
    return [(by_name[one.name], one) for one in found]


def first_difference(one: Stream, other: Stream) -> int | None:
    if one.tokens == other.tokens:
        return None
    both = zip(one.tokens, other.tokens, strict=False)
    return next((i for i, (a, b) in enumerate(both) if a != b), min(len(one.tokens), len(other.tokens)))


def distance(one: Stream, other: Stream) -> float:
    """Returns the largest difference of log-probabilities up to the first other token."""
    if len(one.of_prompt) != len(other.of_prompt):
        return math.inf
    at = first_difference(one, other)
    both = [*zip(one.of_prompt, other.of_prompt, strict=True)]
    both += [*zip(one.logprobs, other.logprobs, strict=False)][:at]
    return max((abs(a - b) for a, b in both), default=0.0)


def write_models(folder: Path, names: Sequence[str]) -> None:
    """Writes checkpoints whose vocabulary is the demo model's."""
    for name in names:
        to = folder / name
        if name == "demo":
            shutil.copytree(DEMO, to)
            continue
        tiny = BY_NAME[name]
        replace(tiny, fields=tiny.fields | {"vocab_size": VOCAB}).save(to)
        for file in TOKENIZER:
            shutil.copy(DEMO / file, to)


def check(bench: Bench, case: Case, alone: "Future[list[Stream] | str]") -> bool:
    """alone: what one rank answers."""
    expected = alone.result()
    began = time.monotonic()
    found = bench.run(case)
    took_s = time.monotonic() - began
    if isinstance(found, str):
        print(f"FAILED {case}: {found}", flush=True)
        return False
    if isinstance(expected, str):
        print(f"FAILED {case}: it answers, and one rank does not", flush=True)
        return False
    if lines := list(differences(expected, found)):
        print(f"FAILED {case}: {len(lines)} of {len(found)} streams differ; {'; '.join(lines[:4])}", flush=True)
        return False
    ties = sum(one.tokens != other.tokens for one, other in pairs(expected, found))
    most = max(distance(one, other) for one, other in pairs(expected, found))
    num = sum(len(one.tokens) for one in found)
    print(f"ok {case}: {len(found)} streams, {num} tokens, {ties} ties, {most:.1e} apart, {took_s:.0f} s", flush=True)
    for note in bench.notes(case):
        print(f"    {note}", flush=True)
    return True


def check_alone(bench: Bench, model: str) -> list[Stream] | str:
    began = time.monotonic()
    found = bench.run(Case(model, ALONE))
    print(f"{'FAILED' if isinstance(found, str) else 'ok'} {model}, {ALONE}: ", end="")
    print(found if isinstance(found, str) else f"{time.monotonic() - began:.0f} s", flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--jobs", type=int, default=3)
    parser.add_argument("--each", type=float, default=60.0)
    parser.add_argument("--limit", type=float, default=220.0)
    parser.add_argument("--logs", type=Path)
    args = parser.parse_args()
    cases = [Case(model, layout) for model, layouts in MODELS.items() for layout in layouts]
    cases = [case for case in cases if not args.names or any(name in str(case) for name in args.names)]
    models = list(dict.fromkeys(case.model for case in cases))
    with tempfile.TemporaryDirectory() as made:
        folder, logs = Path(made), args.logs or Path(made) / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        bench = Bench(folder, logs, args.device, args.each, time.monotonic() + args.limit)
        write_models(folder, models)
        with ThreadPoolExecutor(args.jobs) as pool:
            alone = {model: pool.submit(check_alone, bench, model) for model in models}
            passed = list(pool.map(lambda case: check(bench, case, alone[case.model]), cases))
    print(f"{sum(passed)} of {len(cases)} cases passed", flush=True)
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
