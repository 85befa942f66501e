"""Common flags, from the command line, a file and the environment to the server's behaviour."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FILE = """
max-model-len: auto
api_server_count: 1
mock-blocks: 20
disable-uvicorn-access-log: true
generation-config: vllm
chat-template-content-format: string
"""
FLAGS = ("--worker-cls", "mock", "--enable-log-requests", "--no-async-scheduling", "--kv-cache-memory-bytes", "1g")


class UnixConnection(HTTPConnection):
    """HTTP over a Unix socket, as `curl --unix-socket`."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=20)
        self._path = str(path)

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(self._path)


def ask(path: Path, method: str, target: str, body: dict[str, object] | None = None, key: str = "") -> tuple[int, Any]:
    connection = UnixConnection(path)
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    try:
        connection.request(method, target, json.dumps(body) if body else None, headers)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def wait_ready(path: Path, server: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            if ask(path, "GET", "/ready")[0] == 200:
                return
        except OSError:
            pass
        assert server.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)


def test_common_flags_take_effect_and_the_log_may_lose_its_reader(tmp_path: Path) -> None:
    path, file, log = tmp_path / "s", tmp_path / "serve.yaml", tmp_path / "log"
    file.write_text(FILE)
    env = {name: value for name, value in os.environ.items() if not name.startswith("BLOCKYARD_")}
    env |= {"PYTHONPATH": str(ROOT / ".src"), "BLOCKYARD_PORT": "tcp://10.0.0.1:8000", "BLOCKYARD_SERVICE_HOST": "h"}
    command = [sys.executable, "-m", "blockyard", "serve", "demo", "--config", str(file), "--uds", str(path), *FLAGS]
    with log.open("w") as stderr:
        server = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=stderr, text=True)
    assert server.stdout is not None
    try:
        said = [server.stdout.readline() for _ in range(2)]
        server.stdout.close()  # as `blockyard serve | head -2`
        wait_ready(path, server)
        assert ask(path, "GET", "/v1/models")[1]["data"][0]["max_model_len"] == 20 * 16
        body = {"model": "demo", "prompt": "a word", "max_tokens": 4}
        status, answer = ask(path, "POST", "/v1/completions", body)
        assert (status, answer["usage"]["completion_tokens"]) == (200, 4)
        server.send_signal(signal.SIGTERM)
        assert server.wait(40) == 0
    finally:
        server.kill()
        server.wait()
    assert said[0].startswith("BLOCKYARD_PORT, BLOCKYARD_SERVICE_HOST: not read")
    assert said[1].startswith("--no-async-scheduling: off is --run-ahead 0")
    lines = log.read_text()
    assert f"{answer['id']}: 1 prompts of " in lines and "tokens for demo, n=1, max_tokens=4" in lines
    assert "/v1/completions 200" not in lines, "no access log"
    assert "Traceback" not in lines and "Error" not in lines
    assert not path.exists()


def test_a_hangup_reads_the_keys_again_and_a_broken_file_keeps_them(tmp_path: Path) -> None:
    path, keys, log = tmp_path / "s", tmp_path / "keys", tmp_path / "log"
    keys.write_text("ann 1111\n")
    env = {name: value for name, value in os.environ.items() if not name.startswith("BLOCKYARD_")}
    env |= {"PYTHONPATH": str(ROOT / ".src")}
    command = [sys.executable, "-m", "blockyard", "serve", "--worker-cls", "mock", "--uds", str(path)]
    with log.open("w") as stderr:
        server = subprocess.Popen(
            [*command, "--api-key-file", str(keys)],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
        )

    def status(key: str) -> int:
        return ask(path, "GET", "/v1/models", key=key)[0]

    def hang_up(until: str) -> None:
        server.send_signal(signal.SIGHUP)
        deadline = time.monotonic() + 20
        while until not in log.read_text():
            assert server.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.02)

    try:
        wait_ready(path, server)
        assert (status("1111"), status("2222"), status("")) == (200, 401, 401)
        keys.write_text("bob 2222\ncid 3333\n")
        hang_up("2 API keys and 0 admin keys are valid now")
        assert (status("1111"), status("2222"), status("")) == (401, 200, 401)
        keys.unlink()
        hang_up(f"the keys stay as they are: --api-key-file {keys}: No such file")
        assert (status("1111"), status("3333"), status("")) == (401, 200, 401)
        server.send_signal(signal.SIGTERM)
        assert server.wait(40) == 0
    finally:
        server.kill()
        server.wait()
    assert "2222" not in log.read_text()
