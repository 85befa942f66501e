"""The gateway's process: its start, its log and its exit code."""

import os
import resource
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import msgspec
import pytest

from blockyard.shared.config.services.gateway import GatewayConfig
from blockyard.shared.config.services.process import BusConfig, ProcessConfig

ROOT = Path(__file__).parents[3]


def start(folder: Path, port: int, open_files: tuple[int, int] | None = None) -> subprocess.Popen[str]:
    """`open_files`: its soft and its hard limit."""
    bus = BusConfig(registry=f"ipc://{folder}/message-bus", bind=f"ipc://{folder}")
    process = ProcessConfig(name="api_gateway 0", bus=bus)
    settings = folder / "gateway.json"
    settings.write_bytes(msgspec.json.encode(GatewayConfig(process=process, host="127.0.0.1", port=port)))
    command = [sys.executable, "-m", "blockyard.services.api_gateway", str(settings)]
    env = os.environ | {"PYTHONPATH": str(ROOT / ".src")}
    process = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)
    if open_files is not None:
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, open_files)
    return process


def status(port: int, path: str) -> int:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as e:
        return e.code
    except urllib.error.URLError:
        return 0


@pytest.fixture
def gateway(request: pytest.FixtureRequest, tmp_path: Path, unused_port: int):
    process = start(tmp_path, unused_port, getattr(request, "param", None))
    try:
        deadline = time.monotonic() + 90  # of a loaded machine
        while status(unused_port, "/live") != 200:
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < deadline
            time.sleep(0.02)
        yield process
    finally:
        process.kill()
        process.communicate()


def test_it_runs_without_a_ring_and_ends_on_sigterm(gateway, unused_port: int) -> None:
    """Without a registry it is live but not healthy, small, and ends with exit code 0."""
    assert status(unused_port, "/health") == 503 and status(unused_port, "/ready") == 503
    rss_mib = int(Path(f"/proc/{gateway.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20
    assert rss_mib <= 70
    assert Path(f"/proc/{gateway.pid}/cmdline").read_bytes().startswith(b"blockyard: api_gateway 0")
    gateway.send_signal(signal.SIGTERM)
    assert gateway.wait(10) == 0


def test_a_port_in_use_is_one_line(gateway, tmp_path: Path, unused_port: int) -> None:
    """Replicas share a port by SO_REUSEPORT; a process that listens without that option does not share it."""
    gateway.send_signal(signal.SIGTERM)
    gateway.wait(10)
    stranger = subprocess.Popen(
        [sys.executable, "-m", "http.server", "--bind", "127.0.0.1", str(unused_port)], stderr=subprocess.DEVNULL
    )
    try:
        while status(unused_port, "/") == 0:
            time.sleep(0.02)
        second = start(tmp_path, unused_port)
        _, said = second.communicate(timeout=20)
    finally:
        stranger.kill()
        stranger.wait()
    assert second.returncode == 2
    assert said == f"error: port {unused_port} is in use: --port takes another\n"


@pytest.mark.parametrize("gateway", [(96, 160)], indirect=True)
def test_idle_connections_beyond_the_limit_on_open_files_do_not_end_it(gateway, unused_port: int) -> None:
    """Regression: they used all file descriptors; then reading its own memory use failed and the process ended."""
    limits = Path(f"/proc/{gateway.pid}/limits").read_text()
    assert next(line.split()[3:5] for line in limits.splitlines() if line.startswith("Max open files")) == ["160"] * 2
    idle = [socket.create_connection(("127.0.0.1", unused_port)) for _ in range(200)]
    time.sleep(1.5)  # its counters are published twice a second
    assert gateway.poll() is None, gateway.communicate()[1]
    assert len(os.listdir(f"/proc/{gateway.pid}/fd")) < 160
    assert status(unused_port, "/live") == 200  # an idle connection is closed for it
    for each in idle:
        each.close()
    gateway.send_signal(signal.SIGTERM)
    assert gateway.wait(10) == 0
