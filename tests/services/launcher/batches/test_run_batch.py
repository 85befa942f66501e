"""`blockyard run-batch`: what is refused before a start, files at URLs, and a ring that ends with its batch."""

import asyncio
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from rings import deployment

from blockyard.services.launcher.batches import remote_files, run_batch
from blockyard.services.launcher.batches.run_batch import BatchFiles, with_batch
from blockyard.shared.errors import BatchError, ConfigError


class Store(ThreadingHTTPServer):
    """A store of objects: GET and PUT. The first `failures` requests get a 503."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Objects)
        self.objects: dict[str, bytes] = {}
        self.failures = 0
        self.redirects: dict[str, str] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Objects(BaseHTTPRequestHandler):
    server: Store

    def do_GET(self) -> None:
        if self.path in self.server.redirects:
            self.send_response(302)
            self.send_header("Location", self.server.redirects[self.path])
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        data = self.server.objects.get(self.path)
        self._answer(404 if data is None else 200, data or b"")

    def do_PUT(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        if not self.server.failures:
            self.server.objects[self.path] = data
        self._answer(201)

    def _answer(self, status: int, data: bytes = b"") -> None:
        if self.server.failures:
            self.server.failures -= 1
            status, data = 503, b""
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setattr(remote_files, "DELAYS_S", (0.01, 0.01))
    with Store() as made:
        thread = threading.Thread(target=made.serve_forever, args=(0.01,))
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def test_files_go_over_http(store: Store, tmp_path: Path) -> None:
    path, data = tmp_path / "file", b"line\n" * 500_000
    store.objects["/in?key=secret"] = data
    store.failures = 2
    asyncio.run(remote_files.fetch(f"{store.url}/in?key=secret", path))
    assert path.read_bytes() == data
    store.failures = 2
    asyncio.run(remote_files.send(path, f"{store.url}/out"))
    assert store.objects["/out"] == data
    asyncio.run(remote_files.fetch(f"{store.url}/none", path, may_be_missing=True))
    assert path.read_bytes() == b""


def test_failed_transfers_name_no_secret(store: Store, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"/none: cannot be read: status 404") as caught:
        asyncio.run(remote_files.fetch(f"{store.url}/none?key=secret", tmp_path / "file"))
    assert "secret" not in str(caught.value)
    store.failures = 99
    path = tmp_path / "out"
    path.write_bytes(b"x")
    with pytest.raises(BatchError, match=f"status 503.*the output is in {path}"):
        asyncio.run(remote_files.send(path, f"{store.url}/out?key=secret"))
    with pytest.raises(ConfigError, match="cannot be read"):
        asyncio.run(remote_files.fetch("http://127.0.0.1:1/in", tmp_path / "file"))


def test_urls_that_cannot_be_used_name_no_secret(store: Store, tmp_path: Path) -> None:
    store.redirects = {"/loop": f"{store.url}/loop?key=secret", "/loop?key=secret": f"{store.url}/loop?key=secret"}
    store.redirects["/away"] = "http://[secret?key=secret"
    for url in (f"{store.url}/loop", f"{store.url}/away", "http://:0bad/in?key=secret"):
        with pytest.raises(ConfigError, match="cannot be read") as caught:
            asyncio.run(remote_files.fetch(url, tmp_path / "file"))
        assert "secret" not in str(caught.value)


def test_the_output_of_before_is_kept_to_resume_alone(store: Store, tmp_path: Path) -> None:
    store.objects |= {"/in": b"{}\n", "/out": b"old\n"}
    for resumes, expected in ((True, b"old\n"), (False, b"")):
        files = BatchFiles.of(f"{store.url}/in", f"{store.url}/out", tmp_path)
        files.prepare(resumes)
        assert (files.input.read_bytes(), files.output.read_bytes()) == (b"{}\n", expected)
    files.output.write_bytes(b"new\n")
    files.deliver()
    assert store.objects["/out"] == b"new\n"


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (("in", "in"), "is the input"),
        (("empty", "out"), "has no lines"),
        (("none", "out"), "none: No such file"),
        (("in", "none/out"), "No such file"),
        ((".", "out"), "is no regular file"),
    ],
)
def test_files_that_cannot_be_used(given: tuple[str, str], line: str, tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(b"{}\n")
    (tmp_path / "empty").write_bytes(b" \n\n")
    with pytest.raises(ConfigError, match=line):
        BatchFiles.of(str(tmp_path / given[0]), str(tmp_path / given[1]), tmp_path).prepare(False)
    assert (tmp_path / "in").read_bytes() == b"{}\n"


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ([], "-i INPUT and -o OUTPUT are needed"),
        (["-i"], "expected one argument"),
        (["--max-lines", "0"], "0 is not at least 1"),
        (["-i", "a", "-o", "b", "--api-gateways", "2"], "--api-gateways: one gateway reads"),
        (["-i", "a", "-o", "b", "--bind", "tcp://x"], "--bind: is for `blockyard run`"),
        (["-i", "a", "-o", "b", "--prot", "1"], "--prot: no such flag"),
    ],
)
def test_flags_that_are_refused(flags: list[str], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        run_batch.main(flags)


def test_lines_at_a_time_follow_the_workers_batches(tmp_path: Path) -> None:
    files = BatchFiles.of("in", "out", tmp_path)
    ring = deployment(tmp_path, "--max-num-seqs", "8", "--data-parallel-size", "3")
    [gateway] = with_batch(ring, files, None).gateways
    assert gateway.batch is not None and gateway.batch.max_lines == 4 * 8 * 3
    [gateway] = with_batch(ring, files, 7).gateways
    assert gateway.batch is not None and gateway.batch.max_lines == 7
