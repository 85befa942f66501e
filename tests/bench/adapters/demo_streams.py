"""The demo model on the CPU with its adapters, to a server without `--enable-lora`: both run, and take turns."""

import contextlib
import tempfile
import time
from pathlib import Path

from raw_client import raw_streams
from rig import ROOT, Row, Server, completion, cpu_seconds, median, serve, table

SHIPPED = ROOT / "shared" / "demo_model" / "adapters"
FLAGS = ("demo", "--device", "cpu", "--max-num-seqs", "16", "--no-enable-prefix-caching")
STREAMS, TOKENS, ROUNDS = 16, 128, 15


def measure() -> list[Row]:
    with contextlib.ExitStack() as stack:
        other = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "other"  # of the same bytes but one
        other.mkdir()
        for file in (SHIPPED / "sql").iterdir():
            (other / file.name).write_bytes(file.read_bytes())
        config = (other / "adapter_config.json").read_text()
        (other / "adapter_config.json").write_text(config.replace('"lora_alpha": 8', '"lora_alpha": 7'))
        folders = {path.name: path for path in [*sorted(SHIPPED.iterdir()), other]}
        modules = [f"{name}={path}" for name, path in folders.items()]
        num = str(len(folders))
        plain = stack.enter_context(serve(*FLAGS))
        adapted = stack.enter_context(serve(*FLAGS, "--max-loras", num, "--lora-modules", *modules))
        names = [*folders]
        loads = [(plain, ["demo"]), (adapted, names), (adapted, ["demo"])]
        found = [_round(loads, is_reversed=i % 2 == 0) for i in range(1 + ROUNDS)][1:]  # the first warms up
    what = f"demo model on the CPU, {STREAMS} streams, {num} adapters: tokens/s to a server without adapters"
    return [(what, _text(found, 1), "0.6 times"), ("the same, none named", _text(found, 2), "0.99 times")]


def _round(loads: list[tuple[Server, list[str]]], *, is_reversed: bool) -> list[tuple[float, float]]:
    """The seconds of each load, measured from the last to the first if so."""
    order = range(len(loads))
    seconds = {i: _seconds(*loads[i]) for i in (reversed(order) if is_reversed else order)}
    return [seconds[i] for i in order]


def _seconds(server: Server, models: list[str]) -> tuple[float, float]:
    """Of all streams: by the clock, and of the worker's CPU."""
    bodies = [completion(TOKENS, model=models[i % len(models)], prompt=[100 + i] * 64) for i in range(STREAMS)]
    begin_s, begin_cpu_s = time.perf_counter(), _cpu_seconds(server)
    logs = raw_streams(server.url, bodies)
    seconds = time.perf_counter() - begin_s, _cpu_seconds(server) - begin_cpu_s
    assert all(log.events()[-1][1].choices[0].finish_reason == "length" for log in logs)
    return seconds


def _cpu_seconds(server: Server) -> float:
    return sum(cpu_seconds(pid) for pid, title in server.family().items() if title.endswith("gpu_worker"))


def _text(found: list[list[tuple[float, float]]], index: int) -> str:
    """Compares the loads of each round with the first of that round."""
    ratios = [sorted(one[0][kind] / one[index][kind] for one in found) for kind in (0, 1)]
    rates = ", ".join(f"{STREAMS * TOKENS / median([one[i][0] for one in found]):,.0f}" for i in (index, 0))
    by_clock, by_cpu = (f"{median(one):.2f} ({one[0]:.2f} to {one[-1]:.2f})" for one in ratios)
    return f"{by_clock} times in {len(found)} rounds ({rates} tokens/s), by CPU time of the worker {by_cpu}"


if __name__ == "__main__":
    print(table(measure()))
