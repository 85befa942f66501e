"""Flags of the HTTP server on real sockets: where it listens, its certificate, its log lines."""

import logging
import ssl
import subprocess
from pathlib import Path

import aiohttp
import pytest

from blockyard.services.api_gateway.http.certificates import tls_context
from blockyard.shared.config.services.gateway import TlsConfig
from blockyard.shared.errors import ConfigError
from blockyard.shared.messages import Tokenize

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


async def test_the_line_of_a_request_names_its_tenant(rig, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "blockyard"):
        async with rig(log_requests=True, access_log=False, api_keys=["some-key"]) as r:
            await r.post("/v1/completions", BODY, headers={"Authorization": "Bearer some-key"})
    assert [line.rpartition(", ")[2] for line in lines_of(caplog)] == ["tenant=key-0"]


def lines_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


async def test_texts_of_prompts_are_shown_as_far_as_asked_for(rig, caplog: pytest.LogCaptureFixture) -> None:
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "tell\nme"}], "max_tokens": 1}
    with caplog.at_level(logging.INFO, "blockyard"):
        async with rig(log_requests=True, access_log=False, max_log_len=8) as r:
            _, first = await r.post("/v1/completions", BODY | {"prompt": ["a long\nprompt", "short"]})
            await r.post("/v1/completions", BODY | {"prompt": [5] * 20})
            await r.post("/v1/chat/completions", chat)
            r.ring.sent.clear()
    texts = [line.partition(": prompt of ")[2].partition(": ")[2] for line in lines_of(caplog) if ": prompt of" in line]
    assert texts[:3] == ["'a long\\np' and 5 more", "'short'", "ids [5, 5, 5, 5, 5, 5, 5, 5] and 12 more"]
    assert len(texts) == 4 and texts[3].startswith("'") and "\n" not in texts[3]
    assert sum(first["id"] in line for line in lines_of(caplog)) == 3


@pytest.mark.parametrize(
    "fields", [{"max_log_len": 8}, {"log_requests": True}, {"log_requests": True, "max_log_len": 0}]
)
async def test_without_both_flags_no_prompt_is_shown(rig, caplog: pytest.LogCaptureFixture, fields) -> None:
    with caplog.at_level(logging.INFO, "blockyard"):
        async with rig(**fields) as r:
            await r.post("/v1/completions", BODY)
            assert not r.ring.frames(Tokenize)[0].want_text
    assert not any("secret" in line for line in lines_of(caplog))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_len", [None, 4])
async def test_answers_are_logged_at_their_end(
    rig, caplog: pytest.LogCaptureFixture, stream: bool, max_len: int | None
) -> None:
    body = BODY | {"n": 2, "stop": None, "temperature": 0.5}
    with caplog.at_level(logging.INFO, "blockyard"):
        async with rig(log_outputs=True, log_deltas=False, access_log=False, max_log_len=max_len) as r:
            if stream:
                answer_id = (await r.events("/v1/completions", body))[0]["id"]
            else:
                answer_id = (await r.post("/v1/completions", body))[1]["id"]
            await r.until(lambda: len(caplog.records) == 2)
    shown = "'w0 w1 w2 '" if max_len is None else "'w0 w' and 5 more"
    assert lines_of(caplog) == [f"{answer_id} choice {i}: 3 tokens, length: {shown}" for i in range(2)]


async def test_events_of_a_stream_are_logged_and_those_of_a_whole_answer_are_not(
    rig, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "blockyard"):
        async with rig(log_outputs=True, access_log=False, stream_interval=2) as r:
            events = await r.events("/v1/completions", BODY)
            await r.until(lambda: len(caplog.records) == 3)
            await r.post("/v1/completions", BODY)
    assert [line.partition(": ")[2] for line in lines_of(caplog)] == [
        "delta 'w0 '",
        "delta 'w1 w2 '",
        "3 tokens, length: 'w0 w1 w2 '",
        "3 tokens, length: 'w0 w1 w2 '",
    ]
    assert lines_of(caplog)[0].startswith(events[0]["id"])


async def test_a_cancelled_answer_is_logged_as_far_as_it_came(rig, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "blockyard"):
        async with rig(log_outputs=True, log_deltas=False, access_log=False) as r:
            r.ring.step_s = 0.02
            async with r.http.post("/v1/completions", json=BODY | {"stream": True, "max_tokens": 200}) as answer:
                await answer.content.readany()
            await r.until(lambda: bool(caplog.records))
    assert ", not finished: 'w0 " in lines_of(caplog)[0]


async def test_paths_without_a_line_in_the_log(rig, caplog: pytest.LogCaptureFixture) -> None:
    paths = ("/tokenize", "/tokenize/", "/llm/tokenize", "/detokenize")
    with caplog.at_level(logging.INFO, "blockyard"):
        async with rig(unlogged_paths=["/tokenize", "/ping"], root_path="/llm") as r:
            for path in paths:
                await r.post(path, {"model": "tiny", "prompt": "x"})
            await r.post("/ping", {})
    assert [line.split()[1] for line in lines_of(caplog)] == ["/detokenize"]


async def test_usage_is_in_every_stream_if_the_server_says_so(rig) -> None:
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    asked = [{}, {"stream_options": {"include_usage": False}}, {"stream_options": {"include_usage": True}}]
    for forces, expected in ((True, [True, True, True]), (False, [False, False, True])):
        async with rig(force_include_usage=forces) as r:
            for path, body in (("/v1/completions", BODY), ("/v1/chat/completions", chat)):
                answers = [await r.events(path, body | more) for more in asked]
                assert [bool(events[-2].get("usage")) for events in answers] == expected
            assert (await r.post("/v1/completions", BODY))[0] == 200


@pytest.mark.parametrize(
    ("fields", "headers", "works"),
    [
        ({}, {f"X-{i}": "y" for i in range(60)}, True),
        ({"max_headers": 40}, {f"X-{i}": "y" for i in range(60)}, False),
        ({}, {"X-Long": "y" * 9000}, False),
        ({"max_header_bytes": 16_000}, {"X-Long": "y" * 9000}, True),
    ],
)
async def test_headers_are_bounded_in_number_and_size(rig, fields, headers: dict[str, str], works: bool) -> None:
    async with rig(**fields) as r:
        async with r.http.get("/live", headers=headers) as answer:
            assert (answer.status == 200) is works
            assert answer.status in (200, 400)
        assert (await r.post("/v1/completions", BODY))[0] == 200
