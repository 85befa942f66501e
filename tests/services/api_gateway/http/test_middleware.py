"""The error middleware."""

import asyncio
import json
import logging
from types import SimpleNamespace

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from blockyard.services.api_gateway.http.middleware import errors


def test_a_bug_is_a_500_in_openai_format_and_a_traceback_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    statuses: list[int] = []
    gateway = SimpleNamespace(meters=SimpleNamespace(responded=statuses.append))

    async def broken(_: web.Request) -> web.StreamResponse:
        raise KeyError("prompt text that must not reach the caller")

    with caplog.at_level(logging.ERROR):
        answer = asyncio.run(errors(gateway)(make_mocked_request("POST", "/v1/completions"), broken))  # type: ignore[arg-type]
    assert isinstance(answer, web.Response)
    assert isinstance(answer.body, bytes)
    assert (answer.status, statuses) == (500, [500])
    assert json.loads(answer.body)["error"]["type"] == "server_error"
    assert b"must not reach" not in answer.body
    assert "KeyError" in caplog.text
