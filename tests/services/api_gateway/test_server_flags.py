"""Flags of the HTTP server on real sockets: where it listens, its certificate, its log lines."""

import logging
import ssl
import subprocess
from pathlib import Path

import aiohttp
import pytest

from blockyard.services.api_gateway.server import tls_context
from blockyard.shared.config.services.gateway import TlsConfig
from blockyard.shared.errors import ConfigError

BODY = {"model": "tiny", "prompt": "secret", "max_tokens": 3, "temperature": 0.5, "stop": ["hidden"]}


async def test_a_unix_socket_answers_and_is_removed_at_the_end(rig, tmp_path: Path) -> None:
    path = tmp_path / "api.sock"
    async with rig(uds=str(path)) as r:
        assert r.port == 0
        connector = aiohttp.UnixConnector(str(path))
        async with (
            aiohttp.ClientSession("http://any", connector=connector) as http,
            http.post("/v1/completions", json=BODY) as answer,
        ):
            assert answer.status == 200
            assert (await answer.json())["usage"]["completion_tokens"] == 3
    assert not path.exists()


async def test_a_socket_that_was_left_behind_is_replaced(rig, tmp_path: Path) -> None:
    path = tmp_path / "api.sock"
    async with rig(uds=str(path)):
        left = tmp_path / "left"
        path.rename(left)
    left.rename(path)
    async with (
        rig(uds=str(path)),
        aiohttp.ClientSession("http://any", connector=aiohttp.UnixConnector(str(path))) as http,
        http.get("/live") as answer,
    ):
        assert answer.status == 200


@pytest.fixture(scope="module")
def one_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificate and key, one after the other."""
    folder = tmp_path_factory.mktemp("pem")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", "k", "-out", "c"]
    subprocess.run([*command, *names], cwd=folder, check=True, capture_output=True)
    both = folder / "both"
    both.write_bytes((folder / "c").read_bytes() + (folder / "k").read_bytes())
    return both


async def test_a_certificate_file_with_the_key_inside(rig, one_file: Path) -> None:
    async with rig(tls=TlsConfig(certfile=str(one_file))) as r:
        trusting = ssl.create_default_context(cafile=str(one_file))
        async with (
            aiohttp.ClientSession(f"https://127.0.0.1:{r.port}") as http,
            http.post("/v1/completions", json=BODY, ssl=trusting) as answer,
        ):
            assert answer.status == 200


def test_a_certificate_file_without_a_key_says_so(one_file: Path) -> None:
    with pytest.raises(ConfigError, match="no --ssl-keyfile: the file must hold the key too"):
        tls_context(TlsConfig(certfile=str(one_file.with_name("c"))))


def test_an_encrypted_key_fails_and_asks_for_no_password(one_file: Path) -> None:
    command = ["openssl", "rsa", "-aes256", "-passout", "pass:word", "-in", "k", "-out", "locked"]
    subprocess.run(command, cwd=one_file.parent, check=True, capture_output=True)
    with pytest.raises(ConfigError, match="TLS: "):
        tls_context(TlsConfig(certfile=str(one_file.with_name("c")), keyfile=str(one_file.with_name("locked"))))


@pytest.mark.parametrize(
    ("fields", "kinds"),
    [
        ({}, ["end"]),
        ({"log_requests": True}, ["came", "end"]),
        ({"log_requests": True, "access_log": False}, ["came"]),
        ({"access_log": False}, []),
    ],
)
async def test_lines_for_a_request(rig, caplog: pytest.LogCaptureFixture, fields: dict[str, bool], kinds) -> None:
    with caplog.at_level(logging.INFO, "blockyard"):
        async with rig(**fields) as r:
            status, answer = await r.post("/v1/completions", BODY | {"n": 2})
    assert status == 200
    lines = [record.getMessage() for record in caplog.records]
    assert ["came" if line.startswith("cmpl-") else "end" for line in lines] == kinds
    for line in lines:
        assert answer["id"].removeprefix("cmpl-") in line
        assert "secret" not in line and "hidden" not in line
    if "came" in kinds:
        assert "1 prompts of 6 tokens for tiny, n=2, max_tokens=3, temperature=0.5" in lines[0]
    if "end" in kinds:
        assert "/v1/completions 200 in " in lines[-1]
