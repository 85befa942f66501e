"""--middleware on real sockets: all three kinds, their order, slow clients, and middleware that answers wrongly."""

import gzip
import logging
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import openai
import pytest
from user_middlewares import (
    BadHeader,
    BadStatus,
    Breaks,
    Collects,
    First,
    Hangs,
    Raises,
    Second,
    Shortens,
    Silent,
    Twice,
    Upper,
    function,
    nothing_in_aiohttp,
    of_aiohttp,
    raises_in_aiohttp,
)

from blockyard.shared.config.flags.documents import help_text
from blockyard.shared.errors import ConfigError

HERE = "user_middlewares"  # in tests/support
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
STREAM = CHAT | {"stream": True}


def names(*found: Any) -> list[str]:
    return [f"{HERE}.{each.__name__}" for each in found]


async def test_the_first_is_outermost_and_every_route_passes_before_keys(rig) -> None:
    async with rig(middleware=names(First, Second), api_keys=["key"]) as r:
        for path, status in (("/v1/models", 401), ("/live", 200), ("/no-such-path", 404)):
            async with r.http.get(path) as answer:
                assert (answer.status, answer.headers.getall("x-passed")) == (status, ["second", "first"]), path
                assert (await answer.read()).startswith(b"{") or path == "/live"


async def test_whole_and_streamed_answers_are_those_without_middleware(rig) -> None:
    found = []
    for middleware in ([], names(First), names(First, function), names(of_aiohttp), names(Collects)):
        async with rig(middleware=middleware) as r:
            status, whole = await r.post("/v1/chat/completions", CHAT)
            assert status == 200
            events = await r.events("/v1/chat/completions", STREAM)
            assert events[-1] == "[DONE]"
            text = "".join(e["choices"][0]["delta"].get("content") or "" for e in events[:-1] if e["choices"])
            found.append((whole["choices"], whole["usage"], text, len(events)))
    first = found[0]
    assert [each[:3] for each in found] == [first[:3]] * len(found)


async def test_functions_of_starlette_answer_in_place_of_the_gateway(rig) -> None:
    async with rig(middleware=names(function)) as r:
        async with r.http.get("/v1/models", headers={"x-deny": "1"}) as answer:
            assert (answer.status, await answer.json()) == (403, {"denied": True})
        async with r.http.get("/v1/models") as answer:
            assert (answer.status, answer.headers["x-passed"]) == (200, "function /v1/models")


async def test_a_large_body_of_unknown_length_arrives_whole(rig) -> None:
    body = msgspec.json.encode(CHAT | {"user": "u" * 100, "metadata": {"a": "x" * 500_000}})

    async def pieces() -> Any:
        for at in range(0, len(body), 30_000):
            yield body[at : at + 30_000]

    async with rig(middleware=names(First)) as r:
        headers = {"Content-Type": "application/json", "Expect": "100-continue"}
        async with r.http.post("/v1/chat/completions", data=pieces(), headers=headers) as answer:
            assert answer.status == 200, await answer.text()
        async with r.http.post("/resume") as answer:  # a POST without a body needs no content type
            assert answer.status == 200, await answer.text()


async def test_a_form_arrives_whole(rig, tmp_path: Path) -> None:
    for middleware in (First, function):
        async with (
            rig(middleware=names(middleware), batch_dir=str(tmp_path)) as r,
            openai.AsyncOpenAI(base_url=f"{r.url}/v1", api_key="none", max_retries=0) as client,
        ):
            file = await client.files.create(file=("in.jsonl", b"x" * 300_000), purpose="batch")
            assert len((await client.files.content(file.id)).content) == file.bytes == 300_000


async def test_a_changed_path_is_routed(rig) -> None:
    async with rig(middleware=names(Upper)) as r, r.http.get("/renamed") as answer:
        assert (await answer.json())["object"] == "list"


async def test_a_middleware_of_starlette_compresses(rig) -> None:
    gzips = ["starlette.middleware.gzip:GZipMiddleware"]
    async with rig(middleware=gzips) as r, aiohttp.ClientSession(r.url, auto_decompress=False) as http:
        async with http.get("/openapi.json", headers={"Accept-Encoding": "gzip"}) as answer:
            assert answer.headers["Content-Encoding"] == "gzip"
            assert b'"openapi"' in gzip.decompress(await answer.read())
        async with http.head("/openapi.json") as answer:
            assert (answer.status, await answer.read()) == (200, b"")


@pytest.mark.parametrize("middleware", [Raises, Silent, raises_in_aiohttp, nothing_in_aiohttp])
async def test_one_that_raises_or_does_not_answer_is_a_500_in_the_apis_form(rig, caplog, middleware) -> None:
    async with rig(middleware=names(middleware)) as r:
        with caplog.at_level(logging.ERROR):
            status, body = await r.post("/v1/chat/completions", CHAT)
            assert status == 500 and body["error"]["message"] == "A middleware of this server failed at this request."
            status, body = await r.post("/v1/messages", CHAT)
            assert status == 500 and body["type"] == "error"
        assert any("a middleware" in line for line in caplog.messages)


@pytest.mark.parametrize("middleware", [BadHeader, BadStatus])
async def test_an_answer_that_cannot_be_sent_is_a_whole_500(rig, middleware) -> None:
    async with rig(middleware=names(middleware)) as r:
        for _ in range(2):  # on one connection
            status, body = await r.post("/v1/chat/completions", CHAT)
            assert status == 500 and body["error"]["message"] == "A middleware of this server failed at this request."


async def test_one_that_hangs_ends_with_its_client(rig) -> None:
    async with rig(middleware=names(Hangs)) as r:
        with pytest.raises(TimeoutError):
            await r.http.get("/live", timeout=aiohttp.ClientTimeout(0.2))
        await r.until(lambda: Hangs.waiting == 0)


async def test_of_two_answers_the_client_has_the_first(rig, caplog) -> None:
    async with rig(middleware=names(Twice)) as r:
        for _ in range(2):
            async with r.http.get("/v1/models") as answer:
                assert (answer.status, await answer.read()) == (418, b"tea")
        assert any("AnswerError" in str(record.exc_info) for record in caplog.records)
        await r.until(lambda: not r.gateway.journal.entries)


@pytest.mark.parametrize("middleware", [Breaks, Shortens])
async def test_an_answer_that_breaks_off_does_not_look_whole(rig, middleware) -> None:
    async with rig(middleware=names(middleware)) as r:
        with pytest.raises(aiohttp.ClientError):
            async with r.http.post("/v1/chat/completions", json=STREAM if middleware is Breaks else CHAT) as answer:
                await answer.read()
        async with r.http.get("/no-such-path") as answer:
            with pytest.raises(aiohttp.ClientError):
                await answer.read()


async def test_a_client_that_leaves_cancels_its_request(rig) -> None:
    async with rig(middleware=names(First, function)) as r:
        r.ring.step_s = 0.05
        with pytest.raises(TimeoutError):
            await r.http.post(
                "/v1/chat/completions", json=CHAT | {"max_tokens": 99}, timeout=aiohttp.ClientTimeout(0.2)
            )
        await r.until(lambda: r.gateway.num_active == 0)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("nomodule", "a name needs a module"),
        ("no.such.module", "ModuleNotFoundError"),
        (f"{HERE}.nothing", "AttributeError"),
        (f"{HERE}.a_plain_function", "is not an ASGI class"),
        (f"{HERE}.NotMade", "LookupError: cannot be made"),
    ],
)
async def test_names_that_cannot_be_used_end_the_start(rig, given: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        async with rig(middleware=[given]):
            pass


async def test_middleware_of_asgi_is_not_inside_that_of_aiohttp(rig) -> None:
    with pytest.raises(ConfigError, match="give its names last"):
        async with rig(middleware=names(of_aiohttp, First)):
            pass


def test_the_flag_is_in_the_help() -> None:
    assert "--middleware" in help_text()
