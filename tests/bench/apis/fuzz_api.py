"""Fuzzes a server with `schemathesis` by its own /openapi.json: `fuzz_api.py --schemathesis PROGRAM [--requests N]`.

The program is that of the package of this name, in an environment of its own. The first run sends what the document's
limits suggest and warms the server up; further ones send random values, until there were N requests. Then come bodies
and heads that end halfway, and requests of 10,000 headers. Fails on a 5xx, on an answer that the document does not
have, on a service that was started again, and on memory of a service that grew by more than 5 %.

Left out: /pause and /sleep, behind which nothing is answered, and the check that each body which fits the document is
taken: it does not say which models there are, nor which fields exclude each other.
"""

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from rig import Server, pss_mib, serve

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
)
LEFT_OUT = "^/(pause|sleep|wake_up)$"
CUT, HEADERS = 200, 10_000
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/files", "/tokenize")
BODY = json.dumps({"model": "demo", "messages": [{"role": "user", "content": "hi " * 400}], "input": "hi"}).encode()
GROWTH = 1.05
SETTLE_S = 3.0


def fuzz(program: str, url: str, report: Path, *phases: str) -> tuple[int, list[str]]:
    """The number of requests, and what was wrong."""
    command = [program, "run", f"{url}/openapi.json", "--no-color", "--no-shrink", "--continue-on-failure"]
    command += ["-w", "2", "-c", ",".join(CHECKS), "--exclude-path-regex", LEFT_OUT, "--request-timeout", "30"]
    command += ["--report", "json", "--report-json-path", str(report), *phases]
    ran = subprocess.run(command, check=False, capture_output=True, text=True, cwd=report.parent)
    if not report.exists():
        raise RuntimeError(ran.stdout[-2000:] + ran.stderr[-2000:])
    found: dict[str, Any] = json.loads(report.read_text())
    wrong = [f"{one['title']}: {', '.join(one['operations'])}" for one in found["failures"]]
    if found["errors"]:  # of the program itself
        print(f"errors of schemathesis: {found['errors']}", flush=True)
    return found["test_cases"]["generated"], wrong


def answer_to(port: int, data: bytes, ends: bool = True) -> bytes:
    """What comes back; `ends`: the client closes its side without waiting for it."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as sock:
        try:
            sock.sendall(data)
            return b"" if ends else sock.recv(1 << 16)
        except ConnectionError:
            return b""


def cut_requests(port: int) -> None:
    for i in range(CUT):
        head = f"POST {PATHS[i % len(PATHS)]} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        whole = f"{head}Content-Length: {len(BODY)}\r\n\r\n".encode() + BODY
        chunked = f"{head}Transfer-Encoding: chunked\r\n\r\n{len(BODY):x}\r\n".encode() + BODY
        answer_to(port, whole[: len(whole) * (i % 19 + 1) // 20])
        answer_to(port, chunked[: len(chunked) * (i % 19 + 1) // 20])


def many_headers(port: int) -> set[bytes]:
    """The statuses of requests with too many headers."""
    lines = "".join(f"X-Field-{i}: {i}\r\n" for i in range(HEADERS))
    statuses = set()
    for path in PATHS:
        answer = answer_to(port, f"POST {path} HTTP/1.1\r\nHost: x\r\n{lines}\r\n".encode(), ends=False)
        statuses.add(answer.partition(b" ")[2][:3])
    return statuses


def memory(server: Server) -> dict[str, tuple[int, float]]:
    """Process id and MiB of each service."""
    time.sleep(SETTLE_S)
    return {title: (pid, pss_mib(pid)) for title, pid in server.children().items()}


def check(server: Server, program: str, folder: Path, wanted: int) -> list[str]:
    warm, wrong = fuzz(program, server.url, folder / "0.json", "--phases", "coverage", "--seed", "1")
    before, num = memory(server), 0
    print(f"{warm} requests of the document's limits; {', '.join(wrong) or 'none wrong'}", flush=True)
    for seed in range(2, 40):
        if num >= wanted:
            break
        phases = ("--phases", "fuzzing", "--seed", str(seed), "-n", "40")
        more, found = fuzz(program, server.url, folder / f"{seed}.json", *phases)
        num, wrong = num + more, wrong + found
        print(f"{num} requests of random values; {', '.join(found) or 'none wrong'}", flush=True)
    cut_requests(server.port)
    statuses = many_headers(server.port)
    print(f"{2 * CUT} requests were cut; {HEADERS} headers: {b', '.join(statuses).decode()}", flush=True)
    wrong += [f"status {status!r} for {HEADERS} headers" for status in statuses if not status.startswith(b"4")]
    for title, (pid, after) in memory(server).items():
        was_pid, was = before[title]
        print(f"{title}: {was:.1f} to {after:.1f} MiB", flush=True)
        if pid != was_pid:
            wrong.append(f"{title} was started again")
        if after > GROWTH * was:
            wrong.append(f"the memory of {title} grew by {100 * (after / was - 1):.0f} %")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--schemathesis", default="schemathesis")
    parser.add_argument("--requests", type=int, default=5000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        mock = (
            "--model",
            "demo",
            "--worker-cls",
            "mock",
            "--mock-step-ms",
            "1",
            "--batch-dir",
            str(folder / "batches"),
        )
        with serve(*mock, log=folder / "log") as server:
            wrong = check(server, args.schemathesis, folder, args.requests)
        log = (folder / "log").read_text()
        if "Traceback" in log:
            wrong.append(log[log.index("Traceback") :][:2000])
    print("\n".join(wrong) or "nothing was wrong")
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
