"""`blockyard run-batch` as users run it: a ring of real processes with the mock worker."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rig import ROOT, Server

START_LIMIT_S = 60.0
LINES = 4000


def start(*flags: str) -> subprocess.Popen[str]:
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / ".src"), os.environ.get("PYTHONPATH", "")])}
    mock = ("--model", "demo", "--worker-cls", "mock", "--no-use-tqdm-on-load")
    command = [sys.executable, "-P", "-m", "blockyard", "run-batch", *mock, *flags]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def write(path: Path, num: int) -> None:
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    line = {"method": "POST", "url": "/v1/chat/completions", "body": body}
    path.write_text("".join(json.dumps({"custom_id": f"line {i}"} | line) + "\n" for i in range(num)))


def answers(path: Path) -> dict[str, Any]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    found = {line["custom_id"]: line["response"] for line in lines}
    assert len(found) == len(lines)
    return found


def wait_for_lines(process: subprocess.Popen[str], path: Path, num: int) -> None:
    until = time.monotonic() + START_LIMIT_S
    while not path.exists() or path.read_bytes().count(b"\n") < num:
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.02)


def gateway(process: subprocess.Popen[str]) -> int:
    return Server(process, 0, 0.0).children()["blockyard: api_gateway 0"]  # type: ignore[arg-type]


def resident_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20


def test_memory_does_not_grow_and_a_killed_gateway_goes_on(tmp_path: Path) -> None:
    given, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write(given, LINES)
    with start("-i", str(given), "-o", str(out)) as process:
        wait_for_lines(process, out, 200)
        os.kill(gateway(process), signal.SIGKILL)
        wait_for_lines(process, out, 2000)
        pid = gateway(process)
        before = after = resident_mb(pid)
        with contextlib.suppress(OSError, IndexError):
            while process.poll() is None:
                after = resident_mb(pid) or after
                time.sleep(0.02)
        said, _ = process.communicate(timeout=60)
    assert process.returncode == 0, said
    assert "killed by SIGKILL" in said and "were answered before" in said
    found = answers(out)
    assert len(found) == LINES and {answer["status_code"] for answer in found.values()} == {200}
    assert after - before < 10  # MB


def test_a_batch_that_was_stopped_is_resumed(tmp_path: Path) -> None:
    given, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write(given, LINES)
    with start("-i", str(given), "-o", str(out)) as process:
        wait_for_lines(process, out, 100)
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=60)
    assert process.returncode == 5 and "stopped before the last line; --resume goes on" in said
    num = len(answers(out))
    assert 100 <= num < LINES
    write(given, num + 50)
    with start("-i", str(given), "-o", str(out), "--resume") as process:
        said, _ = process.communicate(timeout=60)
    assert process.returncode == 0, said
    assert answers(out).keys() >= {f"line {i}" for i in range(num + 50)}


def test_a_full_disk_ends_the_ring(tmp_path: Path) -> None:
    given = tmp_path / "in.jsonl"
    write(given, 20)
    with start("-i", str(given), "-o", "/dev/full") as process:
        said, _ = process.communicate(timeout=60)
    assert process.returncode == 5
    assert "run-batch: error: /dev/full: No space left on device; --resume goes on" in said
