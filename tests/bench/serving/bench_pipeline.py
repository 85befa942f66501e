"""CPU of each process of the ring for one token over HTTP, and how long a process may sleep between steps.

The mock worker takes the GPU's place, or, with --shape, a model of `blockyard bench suite` with random weights runs.
With a core for each process the one with the most CPU a token bounds the rate: 1 / that.

    python tests/bench/serving/bench_pipeline.py [--load 1020x256 252x512] [--step-ms 10] [--shape qwen3-0.6b]
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / ".src"))
sys.path.insert(0, str(Path(__file__).parents[1]))  # for rig

from rig import Row, Server, cpu_seconds, serve, table

from blockyard.services.bench.load.results import RequestResult
from blockyard.services.bench.suite import shapes
from blockyard.services.bench.suite.served import SuiteServer, random_requests
from blockyard.shared.percentiles import percentile

LOG = Path(tempfile.gettempdir()) / "bench_pipeline.log"
HOT = 30  # functions that are shown


def processes(server: Server) -> dict[str, int]:
    """By title: the launcher and all that it started."""
    found, parents = {}, {server.process.pid}
    for pid in sorted(int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()):
        try:
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            title = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
        except OSError:
            continue
        if pid in parents or parent in parents:
            parents.add(pid)
            found[title.removeprefix("blockyard: ")] = pid
    return found


def own_cpu() -> float:
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def flags_of(given: argparse.Namespace, folder: Path) -> list[str]:
    flags = ["--max-num-seqs", "1024", "--max-queue-len", "4096", "--no-enable-prefix-caching"]
    flags += ["--api-gateways", str(given.gateways), "--detokenizers", str(given.detokenizers), *given.flags.split()]
    if given.shape:
        return [str(shapes.write(given.shape, folder)), "--load-format", "dummy", "--max-model-len", "8192", *flags]
    blocks = sum(streams * (tokens + 64) // 16 + 4096 for streams, tokens in loads(given))
    mock = ["--worker-cls", "mock", "--mock-step-ms", str(given.step_ms), "--num-gpu-blocks-override", str(blocks)]
    return ["demo", *mock, *flags, "--max-num-batched-tokens", "2048"]


def loads(given: argparse.Namespace) -> list[tuple[int, int]]:
    return [(int(streams), int(tokens)) for streams, _, tokens in (load.partition("x") for load in given.load)]


def measure(served: SuiteServer, pids: dict[str, int], streams: int, tokens: int, seed: int) -> list[Row]:
    before, mine = {title: cpu_seconds(pid) for title, pid in pids.items()}, own_cpu()
    outcomes = served.stream(random_requests(streams, 32, tokens, seed), each_token=False)
    cpu = {title: cpu_seconds(pid) - before[title] for title, pid in pids.items()}
    cpu["client, its reading of the answers included"] = own_cpu() - mine
    num = streams * tokens
    print(line(outcomes, num), flush=True)
    by_role: dict[str, list[float]] = defaultdict(list)
    for title, seconds in cpu.items():
        by_role[title.rstrip("0123456789 ")].append(seconds)
    return [
        (role, f"{1e6 * max(s) / num:.2f}, {1e6 * sum(s) / num:.2f} of {len(s)}", f"{num / max(*s, 1e-9):,.0f}")
        for role, s in by_role.items()
    ]


def line(outcomes: list[RequestResult], num: int) -> str:
    begin, end = min(one.sent_s for one in outcomes), max(one.ended_s for one in outcomes)
    firsts = sorted(one.tokens_s[0] - begin for one in outcomes)
    gaps = sorted(b - a for one in outcomes for a, b in zip(one.tokens_s, one.tokens_s[1:], strict=False))
    events, ms = sum(len(one.tokens_s) for one in outcomes), 1000
    return (
        f"{num / (end - begin):,.0f} tokens/s over all {end - begin:.2f} s, {events / num:.3f} events a token;"
        f" first tokens after {firsts[0]:.2f} to {firsts[-1]:.2f} s;"
        f" gaps p50 {ms * percentile(gaps, 50):.2f}, p99 {ms * percentile(gaps, 99):.2f} ms;"
        f" last streams end {end - min(one.ended_s for one in outcomes):.2f} s after the first"
    )


def spy(served: SuiteServer, pids: dict[str, int], streams: int, tokens: int, program: str) -> None:
    """Where processes' Python spends a run, by py-spy: shares of the samples in which they did not wait."""
    wanted = ("gpu_worker", "scheduler", "detokenizer 0", "api_gateway 0", "tokenizer_pool 0")
    with tempfile.TemporaryDirectory() as folder:
        jobs = []
        for title in wanted:
            out = Path(folder) / title.replace(" ", "")
            command = [program, "record", "-p", str(pids[title]), "-f", "raw", "-o", str(out), "-r", "500", "-d", "60"]
            jobs.append((title, out, subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)))
        time.sleep(1.5)
        served.stream(random_requests(streams, 32, tokens, seed=99), each_token=False)
        for title, out, job in jobs:
            job.send_signal(2)
            job.wait()
            print(f"\n{title}\n{hottest(out.read_text().splitlines()) if out.is_file() else 'no samples'}", flush=True)


def hottest(stacks: list[str]) -> str:
    own: Counter[str] = Counter()
    within: Counter[str] = Counter()
    for stack in stacks:
        frames, _, count = stack.rpartition(" ")
        names = [f"{f.partition(' (')[0]} {f.rpartition('/')[2].rstrip(')')}" for f in frames.split(";")]
        own[names[-1]] += int(count)
        for name in {name.rpartition(":")[0] for name in names}:
            within[name] += int(count)
    num = sum(own.values()) or 1
    rows = [f"{n / num:6.1%} {name}" for name, n in own.most_common(HOT)]
    return "\n".join([f"{num} samples, own:", *rows, "with callees:"] + [
        f"{n / num:6.1%} {name}" for name, n in within.most_common(HOT + 8)
    ])  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--load", nargs="+", default=["1020x256", "252x512"], help="streams x tokens")
    add("--step-ms", type=float, default=10.0, help="of the mock")
    add("--shape", help="of the suite, in place of the mock")
    add("--gateways", type=int, default=4)
    add("--detokenizers", type=int, default=2)
    add("--flags", default="", help="more, in one word")
    add("--runs", type=int, default=2)
    add("--spy", metavar="PATH", help="py-spy, for where time goes")
    given = parser.parse_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}", flush=True)
    with tempfile.TemporaryDirectory() as folder, serve(*flags_of(given, Path(folder)), log=LOG) as server:
        print(f"ready after {server.ready_s:.1f} s", flush=True)
        served = SuiteServer(server.url, 0.0, 0.0)
        for streams, tokens in loads(given):
            print(f"\n{streams} streams x {tokens} tokens", flush=True)
            served.stream(random_requests(streams, 32, 8, seed=-1), each_token=False)
            pids = processes(server)
            rows = [measure(served, pids, streams, tokens, seed) for seed in range(given.runs)][-1]
            print("of the last run, us of CPU a token: the busiest, and all; tokens/s that its core would bear")
            print(table([(what, us, most) for what, us, most in rows]), flush=True)
            if given.spy:
                spy(served, pids, streams, tokens, given.spy)


if __name__ == "__main__":
    main()
