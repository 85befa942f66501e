"""Six `blockyard run` processes over tcp with Curve keys, as in containers: a completion, health, a clean end."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from tcp_addresses import free_port

SRC = Path(__file__).parents[2] / ".src"
SERVICES = ("message-bus", "gpu-worker", "tokenizer-pool", "scheduler", "detokenizer", "api-gateway")


@pytest.fixture
def variables(tmp_path: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BLOCKYARD_")}
    return kept | {
        "PYTHONPATH": str(SRC),
        "BLOCKYARD_MESSAGE_BUS": f"tcp://127.0.0.1:{free_port()}",
        "BLOCKYARD_CURVE_KEYS": str(tmp_path / "keys"),
        "BLOCKYARD_ADVERTISE": "127.0.0.1",
        "BLOCKYARD_MODEL": "demo",
        "BLOCKYARD_WORKER_CLS": "mock",
        "BLOCKYARD_HOST": "127.0.0.1",
        "BLOCKYARD_PORT": str(free_port()),
    }


def blockyard(variables: dict[str, str], *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "blockyard", *args]
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=30, check=False)


@pytest.fixture
def ring(variables: dict[str, str]) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    assert blockyard(variables, "keys", variables["BLOCKYARD_CURVE_KEYS"]).returncode == 0
    with contextlib.ExitStack() as stack:
        found = {}
        for service in SERVICES:
            command = [sys.executable, "-m", "blockyard", "run", service]
            found[service] = stack.enter_context(subprocess.Popen(command, env=variables))
            stack.callback(found[service].kill)
        yield found


def complete(port: str) -> dict[str, object]:
    body = json.dumps({"model": "demo", "prompt": "import os", "max_tokens": 8}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", data=body, headers={"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=20) as answer:
        found = json.load(answer)
    assert isinstance(found, dict)
    return found


def wait_ready(port: str) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=2).close()
            return
        time.sleep(0.05)
    raise AssertionError("the ring was not ready in 60 s")


def wait_health(url: str, status: int) -> str:
    """The body of the first answer with that status."""
    deadline = time.monotonic() + 15
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                found, body = answer.status, answer.read()
        except urllib.error.HTTPError as e:
            found, body = e.code, e.read()
        if found == status:
            return str(body, "utf-8")
        time.sleep(0.1)
    raise AssertionError(f"/health did not become {status} in 15 s")


def test_a_ring_of_processes_run_by_hand(
    ring: dict[str, subprocess.Popen[bytes]], variables: dict[str, str], tmp_path: Path
) -> None:
    wait_ready(variables["BLOCKYARD_PORT"])
    answer = complete(variables["BLOCKYARD_PORT"])
    assert isinstance(answer["usage"], dict)
    assert answer["usage"]["completion_tokens"] == 8

    shown = blockyard(variables, "ring")
    assert shown.stdout.count(" ready ") == len(SERVICES) - 1  # the registry is no member
    assert blockyard(variables, "ring", "--check").returncode == 0

    stranger = variables | {"BLOCKYARD_CURVE_KEYS": str(tmp_path / "other")}
    assert blockyard(stranger, "keys", str(tmp_path / "other")).returncode == 0
    assert blockyard(stranger, "ring").returncode == 1

    health = f"http://127.0.0.1:{variables['BLOCKYARD_PORT']}/health"
    for service in ("detokenizer", "tokenizer-pool"):
        ring[service].send_signal(signal.SIGSTOP)
        assert service.replace("-", "_") in wait_health(health, 503)
        ring[service].send_signal(signal.SIGCONT)
        wait_health(health, 200)

    for process in reversed(ring.values()):
        process.send_signal(signal.SIGTERM)
    assert {service: process.wait(20) for service, process in ring.items()} == dict.fromkeys(SERVICES, 0)
