"""The error middleware."""

import asyncio
import json
import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer, make_mocked_request

from blockyard.services.api_gateway.apis.chat import CHAT
from blockyard.services.api_gateway.http.access import Access, Guard, Route
from blockyard.services.api_gateway.http.middleware import errors
from blockyard.shared.errors import RequestError


def test_a_bug_is_a_500_in_openai_format_and_a_traceback_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    statuses: list[int] = []
    gateway = SimpleNamespace(meters=SimpleNamespace(responded=statuses.append))

    async def broken(_: web.Request) -> web.StreamResponse:
        raise KeyError("prompt text that must not reach the caller")

    with caplog.at_level(logging.ERROR):
        handle = errors(gateway, Guard([], []))  # type: ignore[arg-type]
        answer = asyncio.run(handle(make_mocked_request("POST", "/v1/completions"), broken))
    assert isinstance(answer, web.Response)
    assert isinstance(answer.body, bytes)
    assert (answer.status, statuses) == (500, [500])
    assert json.loads(answer.body)["error"]["type"] == "server_error"
    assert b"must not reach" not in answer.body
    assert "KeyError" in caplog.text


async def test_an_error_has_the_form_of_the_api_whose_route_it_is() -> None:
    async def refuses(_: web.Request) -> web.StreamResponse:
        raise RequestError("no", status=503)

    guard = Guard([], [])
    app = web.Application(middlewares=[errors(SimpleNamespace(meters=SimpleNamespace(responded=int)), guard)])  # type: ignore[arg-type]
    api = replace(CHAT, error_body=lambda error: f"own: {error}".encode(), error_statuses={503: 529})
    own = Route("POST", "/own", refuses, Access.OPEN, api)
    for route in (own, Route("POST", "/openai", refuses, Access.OPEN)):
        guard.add(app, route, route.path)
    async with TestClient(TestServer(app)) as client:
        answers = {path: await client.post(path) for path in ("/own", "/openai", "/none")}
        bodies = {path: await answer.text() for path, answer in answers.items()}
        assert await (await client.get("/own")).text() == "own: /own does not take GET."
        of_version = await (await client.post("/none", headers={"Anthropic-Version": "2023-06-01"})).text()
    assert bodies["/own"] == "own: no"
    assert [json.loads(bodies[path])["error"]["message"][:8] for path in ("/openai", "/none")] == ["no", "There is"]
    assert [answer.status for answer in answers.values()] == [529, 503, 404]
    assert json.loads(of_version)["error"]["type"] == "not_found_error"


async def test_a_wrong_method_is_told_the_right_ones(rig) -> None:
    async with rig() as r:
        for method, path, right in (
            ("DELETE", "/v1/models", {"GET", "HEAD"}),
            ("TRACE", "/v1/responses", {"GET", "POST"}),
        ):
            async with r.http.request(method, path) as response:
                assert response.status == 405 and (await response.json())["error"]["code"] == "method_not_allowed"
                assert right <= set(response.headers["Allow"].split(","))
