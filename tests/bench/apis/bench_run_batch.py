"""Chats a second of `blockyard run-batch` to those of `LLM.chat`: `bench_run_batch.py [--lines N] [--pairs N]`.

Each has a ring of its own with the mock worker; the two run in turns. The batch is timed from its first answers to its
last, `LLM.chat` in a second call. CPU is that of all processes of the ring and of its caller, in the same time.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))
from rig import ROOT, cpu_seconds, family, rss_mib

from blockyard import LLM, SamplingParams

SLOTS, TOKENS = 64, 16
WORDS = [f"word{i}" for i in range(16)]
LOOK_S = 0.02
WARM_LINES = 2000  # before memory is looked at


class Run(NamedTuple):
    chats: int
    wall_s: float
    cpu_s: dict[str, float]  # by role
    note: str = ""

    def __str__(self) -> str:
        roles = ", ".join(f"{title} {1e6 * s / self.chats:.0f}" for title, s in sorted(self.cpu_s.items()) if s)
        return f"{self.chats / self.wall_s:,.0f} chats/s, us of CPU a chat: {roles}{self.note}"

    @property
    def total_s(self) -> float:
        return sum(self.cpu_s.values())


def chats(count: int) -> list[list[dict[str, str]]]:
    return [[{"role": "user", "content": f"{i}: " + " ".join(WORDS[: 4 + i % 12])}] for i in range(count)]


def family_cpu_s(root: int) -> Counter[str]:
    """CPU of a process and its descendants, by title."""
    found: Counter[str] = Counter()
    for pid, title in family(root).items():
        with contextlib.suppress(FileNotFoundError):
            found[title.split()[0] if pid != root else "caller"] += cpu_seconds(pid)
    return found


def run_batch(count: int, folder: Path) -> Run:
    given, out = folder / "in.jsonl", folder / "out.jsonl"
    with given.open("w") as file:
        for i, messages in enumerate(chats(count)):
            body = {"messages": messages, "max_tokens": TOKENS, "ignore_eos": True}
            line = {"custom_id": str(i), "method": "POST", "url": "/v1/chat/completions", "body": body}
            file.write(json.dumps(line) + "\n")
    flags = ("--model", "demo", "--worker-cls", "mock", "--mock-step-ms", "0", "--max-num-seqs", str(SLOTS))
    command = (sys.executable, "-m", "blockyard", "run-batch", "-i", str(given), "-o", str(out), *flags)
    environment = os.environ | {"PYTHONPATH": str(ROOT / ".src")}
    out.write_bytes(b"")
    began: tuple[int, float, Counter[str]] | None = None
    memory: list[float] = []
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as process, out.open("rb") as written:
        num_read, last = 0, (0, 0.0, Counter[str]())
        while process.poll() is None:
            time.sleep(LOOK_S)
            num_read += written.read().count(b"\n")
            if num_read:
                last = (num_read, time.perf_counter(), family_cpu_s(process.pid))
                began = began or last
                if num_read > WARM_LINES:
                    memory += [rss_mib(pid) for pid, name in family(process.pid).items() if "api_gateway" in name]
            if num_read == count:
                break
        assert began is not None and num_read == count, f"the batch ended with {num_read} lines"
    grown = f", memory of its gateway grown by {memory[-1] - memory[0]:.1f} MiB"
    return Run(last[0] - began[0], last[1] - began[1], last[2] - began[2], grown)


def offline(count: int) -> Run:
    """In a process of its own, whose children are the ring."""
    code = f"from bench_run_batch import measure_llm; measure_llm({count})"
    path = os.pathsep.join([str(ROOT / ".src"), str(Path(__file__).parent), str(Path(__file__).parents[1])])
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, check=True, capture_output=True, text=True)
    wall_s, cpu_s = json.loads(done.stdout.splitlines()[-1])
    return Run(count, wall_s, cpu_s)


def measure_llm(count: int) -> None:
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    with LLM("demo", worker_cls="mock", mock_step_ms=0, max_num_seqs=SLOTS) as llm:
        llm.chat(chats(200), params, use_tqdm=False)
        before, start = family_cpu_s(os.getpid()), time.perf_counter()
        assert len(llm.chat(chats(count), params, use_tqdm=False)) == count
        print(json.dumps([time.perf_counter() - start, family_cpu_s(os.getpid()) - before]))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lines", type=int, default=20_000)
    parser.add_argument("--pairs", type=int, default=3)
    args = parser.parse_args()
    for _ in range(args.pairs):
        with tempfile.TemporaryDirectory() as folder:
            batch, llm = run_batch(args.lines, Path(folder)), offline(args.lines)
        wall = (batch.chats / batch.wall_s) / (llm.chats / llm.wall_s)
        cpu = (batch.chats / batch.total_s) / (llm.chats / llm.total_s)
        print(f"run-batch {batch}; LLM.chat {llm}; ratio {wall:.2f}, by CPU {cpu:.2f}", flush=True)


if __name__ == "__main__":
    main()
