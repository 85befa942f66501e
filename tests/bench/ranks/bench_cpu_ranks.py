"""The table of ranks on CPUs, which talk over gloo: each row is printed as soon as it is measured.

`bench_cpu_ranks.py [--limit 3600] [--tokens 20000] [--plans 10000] [NAME ...]`

NAME: a part of a row's name. The rows, of tiny random checkpoints in float32 unless they say otherwise:

- `logits LAYOUT`: the largest difference from transformers' logits over all positions of a prompt in chunks, and the
  model that has it. All architectures with `-tp 2`; unlike ones in the other layouts. `ep 4`: experts are whole on four
  ranks. `dp 2 ep 2`: experts are spread over two replicas of two ranks.
- `equality LAYOUT`: the conditions of bench_equality.py on a leader with follower processes, compared with outputs of
  one rank, each alone. At least --tokens are compared.
- `invariant LAYOUT`: the same with --batch-invariant, compared with outputs of the same layout.
- `replicas`: two replicas that have the experts together, answers of a ring, a rank of one killed meanwhile.
- `plans LAYOUT`: --plans plans of random streams with preemption, on ranks that are delayed at random. A rank must have
  recorded the collectives of the others. `as gpu`: with the steps of a GPU in plain torch.
- `kills`: rings of the demo model: a leader and a follower are killed and stopped amid streams.
- `roles LAYOUTS`: 200 answers of a group for prefills and one of another shape for decodes, compared with one rank's.
- `roles kills`: a ring of such groups, whose single ranks are killed while KV is sent.
- `ray`: the tests of ranks that Ray starts. `hosts`: those of several hosts, as addresses and as network namespaces.
- `memory`: modules of ranks that a worker of one rank has loaded, and the Python memory that loading them took.

Each row is a process, which is ended when --limit has passed since the start: a row that hangs fails. What is tested as
a whole is a run of pytest. Exit code 1: a row has failed, or was not begun.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random

import msgspec
import torch

TESTS = Path(__file__).parents[2]
WORKER = TESTS / "services" / "gpu_worker"
SUPPORT = ("", "adapters", "answers", "formats", "models", "ranks")
sys.path += [str(TESTS.parent / ".src"), str(TESTS / "bench"), *(str(TESTS / "support" / name) for name in SUPPORT)]
sys.path += [str(WORKER / name) for name in ("execution", "parallel", "transfers")]

import replica_logits  # noqa: E402 -- found by the lines above
import test_rank_logits as rank_tests  # noqa: E402
import test_replica_logits as replica_tests  # noqa: E402
from core_loop import CoreLoop  # noqa: E402
from delayed_ranks import DelayedRanks  # noqa: E402
from equality import BLOCK_BYTES, CONDITIONS, FEW, MAX_MODEL_LEN, Bench, noisy, requests  # noqa: E402
from limited_process import run_limited  # noqa: E402
from rank_group import Group  # noqa: E402
from rank_logits import prompt  # noqa: E402
from report import machine  # noqa: E402
from scheduling.bench_equality import COUNT, MAX_TOKENS  # noqa: E402
from test_delayed_ranks import CAPACITY, run_streams  # noqa: E402
from test_rank_roles import Roles  # noqa: E402
from ties import Ties  # noqa: E402
from tiny_models import BY_NAME, MODELS, greedy_score, settings, start  # noqa: E402

from blockyard.services.gpu_worker.runner import Runner  # noqa: E402
from blockyard.shared.messages import KVRole  # noqa: E402

NUM_ROLE_REQUESTS = 120  # every third has three choices: 200 answers
LOGITS_BAR = 1e-4
HEAD = "| row | what | measured | bar | seconds |\n|---|---|---|---|---|"
# Loads a worker of one rank and adds up the Python memory of each module of ranks, without that of what it imports.
LOAD = """
import sys, tracemalloc
from importlib.machinery import SourceFileLoader
from pathlib import Path
import torch, transformers

load, inner, sizes = SourceFileLoader.exec_module, [0], {}

def measured(loader, module):
    before = tracemalloc.get_traced_memory()[0]
    inner.append(0)
    load(loader, module)
    all_bytes = tracemalloc.get_traced_memory()[0] - before
    sizes[module.__name__] = all_bytes - inner.pop()
    inner[-1] += all_bytes

SourceFileLoader.exec_module = measured
tracemalloc.start()
from blockyard.services.gpu_worker import __main__, engine
from blockyard.shared.config.services.worker import WorkerConfig
from blockyard.shared.process.settings import read
engine.start(read(Path(sys.argv[1]), WorkerConfig), lambda *said: None)
own = [size for name, size in sizes.items() if {"parallel", "ranks"} & set(name.split("."))]
print(len(own), sum(own))
"""


@dataclass(frozen=True, slots=True)
class Amounts:
    tokens: int
    plans: int


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    what: str
    bar: str
    measure: Callable[[Amounts, Path], str] | None = None  # gets an empty folder; raises if the bar is missed
    tests: Sequence[str] = ()  # in its place: paths for pytest, below tests/


def within_bar(differences: dict[str, float]) -> str:
    name = max(differences, key=lambda name: differences[name])
    said = f"{differences[name]:.1e} ({name}; {len(differences)} models)"
    assert differences[name] <= LOGITS_BAR, said
    return said


def logits(names: Sequence[str], size: int, num_stages: int, amounts: Amounts, folder: Path, *flags: str) -> str:
    difference = rank_tests.compared(size, list(names), folder, *flags, num_stages=num_stages)
    return within_bar({name: difference(name) for name in names})


def expert_logits(amounts: Amounts, folder: Path) -> str:
    return logits(rank_tests.MIXTURES, 4, 1, amounts, folder, "--spread")


def replicas_logits(amounts: Amounts, folder: Path) -> str:
    """The larger difference of two replicas, each with a prompt's chunks in other steps."""
    expected = {}
    for name in replica_tests.MIXTURES:
        theirs = BY_NAME[name].save(folder / name)
        with torch.no_grad():
            expected[name] = theirs(torch.tensor([prompt()])).logits[0]
    replica_logits.run(2, 2, folder / "group", [folder / name for name in expected])
    found: dict[str, float] = {}
    for name, theirs in expected.items():
        both = [torch.load(folder / name / replica_logits.output(replica)) for replica in range(2)]
        found[name] = max(float((one - theirs).abs().max()) for one in both)
    return within_bar(found)


@dataclass(frozen=True, slots=True)
class Layout:
    size: int  # ranks of a stage
    num_stages: int = 1
    model: str = "llama"
    expert_parallel: bool = False


class LaidOut:
    """The runners of a `Bench` in a layout, each a leader with its followers."""

    def __init__(self, layout: Layout, folder: Path, batch_invariant: bool) -> None:
        self._layout, self._folder, self._batch_invariant = layout, folder, batch_invariant
        self._groups: list[Group] = []

    def start(self, num_blocks: int = 400, host_gib: float = 0.0) -> Runner:
        layout, own = self._layout, self._folder / f"group-{len(self._groups)}"
        own.mkdir()
        config = settings(
            self._folder / "model",
            max_model_len=MAX_MODEL_LEN,
            batch_invariant=self._batch_invariant,
            num_gpu_blocks_override=num_blocks,
            swap_space_gib=host_gib,
            tensor_parallel_size=layout.size,
            pipeline_parallel_size=layout.num_stages,
            expert_parallel=layout.expert_parallel,
        )
        self._groups.append(Group(config, own))
        return self._groups[-1].start()

    def close(self) -> None:
        for group in self._groups:
            group.team.close()


def equality(layout: Layout, batch_invariant: bool, amounts: Amounts, folder: Path) -> str:
    bench, ties, round_ = Bench(folder / "model", batch_invariant, model=layout.model), Ties(), 0
    alone = bench.roomy
    laid_out = LaidOut(layout, folder, batch_invariant)
    try:
        roomy, bench.second, bench.small = laid_out.start(), laid_out.start(), laid_out.start(FEW)
        bench.swapping = laid_out.start(FEW, 300 * BLOCK_BYTES / 2**30)
        while ties.tokens < amounts.tokens:
            asked = requests(COUNT, MAX_TOKENS, first=round_ * COUNT)
            bench.roomy = roomy if batch_invariant else alone
            expected = bench.alone(asked)
            bench.roomy = roomy
            for name, condition in CONDITIONS.items():
                bench.compare(name, asked, expected, condition(bench, asked), ties)
            round_ += 1
    finally:
        laid_out.close()
    ties.check()
    assert not (batch_invariant and ties.ties), ties.ties
    return f"{len(ties.ties)} ties in {ties.tokens:,} equal tokens"


def plans(size: int, num_stages: int, as_gpus: bool, amounts: Amounts, folder: Path) -> str:
    torch.set_num_threads(1)
    model, group, rng, num_plans = folder / "model", folder / "group", Random(5), 0
    group.mkdir()
    BY_NAME["llama"].save(model)
    geometry = start(model, max_num_seqs=CAPACITY).geometry
    ranks = DelayedRanks(model, group, geometry, size, num_stages, as_gpus=as_gpus)
    while num_plans < amounts.plans:
        num_plans += run_streams(ranks.runner, rng)
    ranks.close()
    return f"{num_plans:,} plans, {ranks.check_records():,} collectives and messages: equal logs, no hang"


def roles(shapes: Sequence[tuple[int, int]], connector: str, amounts: Amounts, folder: Path) -> str:
    """shapes: of the groups for prefills and decodes, ranks of a stage and stages."""
    model = folder / "model"
    score = greedy_score(BY_NAME["llama"].save(model))
    asked, alone, ties = requests(NUM_ROLE_REQUESTS, 12), CoreLoop(start(model, max_model_len=256)), Ties()
    both = Roles(folder, decode_prefill_tokens=8, chunk=16)
    try:
        for role, (size, num_stages) in zip((KVRole.PREFILL, KVRole.DECODE), shapes, strict=True):
            both.add(model, role, size, connector, num_stages)
        for loop in (alone, both.loop):
            for request in asked:
                loop.add(request.name, request.prompt, request.sampling, request.n)
            loop.run()
        places = [(request, choice) for request in asked for choice in range(request.n)]
        for request, choice in places:
            place, judge = (request.name, choice), noisy(score, request.sampling, choice)
            ties.compare(str(place), request.prompt, alone.outputs[place], both.loop.outputs[place], judge)
        ties.check()
        landed, left = both.loop.ledger.num_landed, both.loop.core.stats().blocks_used
        assert landed and not left and not both.errors, f"{landed} transfers, {left} blocks left, {both.errors}"
    finally:
        both.close()
    said = f"{len(places)} answers, {ties.tokens:,} equal tokens, {len(ties.ties)} ties"
    return f"{said}; {landed} transfers, 0 blocks left"


def memory(amounts: Amounts, folder: Path) -> str:
    BY_NAME["llama"].save(folder / "model")
    file = folder / "settings"
    file.write_bytes(msgspec.json.encode(settings(folder / "model")))
    command = [sys.executable, "-P", "-c", LOAD, str(file)]
    loaded = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert loaded.returncode == 0, loaded.stderr[-500:]
    num_modules, size_bytes = map(int, loaded.stdout.split()[-2:])
    said = f"{size_bytes / 1e6:.1f} MB of {num_modules} modules"
    assert size_bytes <= 5e6, said
    return said


LAYOUTS = {
    "tp 2": Layout(2),
    "pp 2": Layout(1, 2),
    "tp 2 pp 2": Layout(2, 2),
    "tp 3": Layout(3),
    "tp 4": Layout(4),
    "ep 4": Layout(4, model="mixtral", expert_parallel=True),
}
RANK_LOGITS = {  # models, ranks of a stage, stages
    "tp 2": ([tiny.name for tiny in MODELS], 2, 1),
    "tp 3": (rank_tests.UNEVEN, 3, 1),
    "tp 4": (rank_tests.UNEVEN, 4, 1),
    "pp 2": (rank_tests.UNLIKE, 1, 2),
    "tp 2 pp 2": (rank_tests.UNLIKE, 2, 2),
}
ROLES = {"tp 2 to tp 2 pp 2": ((2, 1), (2, 2)), "pp 2 to tp 3": ((1, 2), (3, 1))}
AWAY = "largest difference from transformers"


def rows() -> list[Row]:
    """The most important first."""
    bar = "1e-4"
    made = [Row(f"logits {name}", AWAY, bar, partial(logits, *given)) for name, given in RANK_LOGITS.items()]
    made += [Row("logits ep 4", AWAY, bar, expert_logits), Row("logits dp 2 ep 2", AWAY, bar, replicas_logits)]
    rings = "integration/workers/"
    made += [
        Row("kills", "kill -9 and SIGSTOP of ranks amid streams", "same texts", tests=[f"{rings}test_two_ranks.py"]),
        Row("roles kills", "kill -9 of ranks amid transfers", "same texts", tests=[f"{rings}test_rank_roles.py"]),
        Row("replicas", "answers, kill -9 of a rank", "same", tests=[f"{rings}test_expert_replicas.py"]),
    ]
    for kind, invariant, most in (("equality", False, "1 tie in 100,000"), ("invariant", True, "none")):
        what = f"{len(CONDITIONS)} conditions{', --batch-invariant' if invariant else ''}"
        for name, layout in LAYOUTS.items():
            made.append(Row(f"{kind} {name}", what, most, partial(equality, layout, invariant)))
    for name, shapes in ROLES.items():
        made.append(Row(f"roles {name}", "answers of unlike groups", "equal", partial(roles, shapes, "tcp")))
    for name in ("tp 2", "pp 2", "tp 2 pp 2"):
        for kind, as_gpus in (("", False), (" as gpu", True)):
            layout, what = LAYOUTS[name], "ranks delayed at random"
            measure = partial(plans, layout.size, layout.num_stages, as_gpus)
            made.append(Row(f"plans {name}{kind}", what, "equal logs, no hang", measure))
    made += [
        Row("memory", "ranks' modules in a worker of one rank", "5 MB", memory),
        Row("hosts", "kills on two hosts, a partition of 10 s", "same texts", tests=[f"{rings}test_several_hosts.py"]),
        Row("ray", "kill -9 of an actor and a raylet", "same texts", tests=[f"{rings}test_ray_ranks.py"]),
    ]
    return made


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}


def command_of(row: Row, amounts: Amounts) -> list[str]:
    if row.tests:
        paths = [str(TESTS / path) for path in row.tests]
        return [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:benchmark", "-p", "no:cacheprovider", *paths]
    given = ["--tokens", str(amounts.tokens), "--plans", str(amounts.plans)]
    return [sys.executable, "-P", str(Path(__file__)), "--measure", row.name, *given]


def result_of(row: Row, amounts: Amounts, limit_s: float) -> tuple[bool, str]:
    """Runs a row as a process. Returns whether the bar is reached, and what was measured, or the cause."""
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        command, env = command_of(row, amounts), environment()
        code = run_limited(command, limit_s, env=env, stdout=output, stderr=errors, cwd=TESTS.parent)
        output.seek(0)
        errors.seek(0)
        printed, said = ([line for line in file.read().splitlines() if line.strip()] for file in (output, errors))
    if code is None:
        return False, f"FAILED: not done when the limit of {limit_s:.0f} s was over"
    reasons = [line.partition("] ")[2].partition(": ")[2] for line in printed if line.startswith("SKIPPED")]
    skipped = list(dict.fromkeys(reasons))  # once each
    failed = [line for line in printed if line.startswith(("FAILED", "ERROR", "E  "))]
    last = (printed or [""])[-1].strip("= ")
    if row.tests and code == 0:
        return True, "; ".join([last if " passed" in last else "NOT MEASURED", *skipped])
    if code == 0:
        return True, last
    cause = next((line for line in reversed(said) if not line.startswith((" ", "Writing"))), "")
    return False, "FAILED: " + "; ".join([*failed[:2], last if row.tests else cause])


def print_table(chosen: Sequence[Row], amounts: Amounts, limit_s: float) -> bool:
    """Returns whether all rows have reached their bars."""
    print(f"{machine()}, gloo\n\n{HEAD}", flush=True)
    ends, results = time.monotonic() + limit_s, list[bool]()
    for row in chosen:
        began = time.monotonic()
        reached, measured = False, "FAILED: not begun, the limit was over"
        if began < ends:
            reached, measured = result_of(row, amounts, ends - began)
        results.append(reached)
        cells = (row.name, row.what, measured.replace("|", "/"), row.bar, f"{time.monotonic() - began:.0f}")
        print("| " + " | ".join(cells) + " |", flush=True)
    return all(results)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds")
    parser.add_argument("--tokens", type=int, default=20_000, help="compared in each layout, at least")
    parser.add_argument("--plans", type=int, default=10_000, help="of each layout")
    parser.add_argument("--measure", help=argparse.SUPPRESS)  # in a process of its own
    args = parser.parse_args()
    amounts = Amounts(args.tokens, args.plans)
    if args.measure:
        [measure] = [row.measure for row in rows() if row.name == args.measure]
        assert measure is not None
        with tempfile.TemporaryDirectory() as folder:
            print(measure(amounts, Path(folder)))
        return 0
    chosen = [row for row in rows() if not args.names or any(name in row.name for name in args.names)]
    return 0 if print_table(chosen, amounts, args.limit) else 1


if __name__ == "__main__":
    sys.exit(main())
