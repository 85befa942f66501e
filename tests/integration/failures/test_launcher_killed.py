"""The next launcher removes the folder of a killed one, and a second launcher on a port is refused; with real rings."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tcp_addresses import free_port

SRC = Path(__file__).parents[3] / ".src"


@pytest.fixture
def temporary() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="by-") as path:  # short: ipc paths are limited
        yield Path(path)


def command(port: int) -> list[str]:
    flags = ["--worker-cls", "mock", "--host", "127.0.0.1", "--port", str(port)]
    return [sys.executable, "-P", "-m", "blockyard", "serve", *flags]


def environment(temporary: Path) -> dict[str, str]:
    paths = os.pathsep.join([str(SRC), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"PYTHONPATH": paths, "TMPDIR": str(temporary)}


@contextmanager
def launched(temporary: Path, port: int) -> Iterator["subprocess.Popen[str]"]:
    with subprocess.Popen(command(port), env=environment(temporary), stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_line(process: "subprocess.Popen[str]", words: str) -> None:
    assert process.stdout is not None
    assert any(words in line for line in process.stdout), f"it ended without saying {words!r}"


def folders(temporary: Path) -> set[str]:
    return {path.name for path in temporary.iterdir() if path.name.startswith("blockyard-")}


def test_a_second_launcher_and_a_killed_one(temporary: Path) -> None:
    port = free_port()
    with launched(temporary, port) as first:
        deadline = time.monotonic() + 30
        while not any(path.name == "gpu_worker.json" for path in temporary.glob("*/*")):  # it has begun to start
            assert time.monotonic() < deadline
            time.sleep(0.02)
        second = subprocess.run(
            command(port), env=environment(temporary), capture_output=True, text=True, timeout=30, check=False
        )
        assert second.returncode == 2
        assert second.stderr == f"blockyard serve: error: port {port} is in use; choose another with --port\n"
        wait_line(first, "is served at")
        left = folders(temporary)
        assert len(left) == 1
        first.kill()
        first.wait()
    assert folders(temporary) == left
    with launched(temporary, port) as third:
        wait_line(third, "is served at")
        assert len(folders(temporary)) == 1
        assert not folders(temporary) & left
        third.send_signal(signal.SIGTERM)
        assert third.wait(30) == 0
    assert not folders(temporary)
