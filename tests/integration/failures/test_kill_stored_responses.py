"""kill -9 of gateways that keep responses, in memory and on the disk."""

import json
import os
import signal
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import openai
import pytest
from rig import Server, serve

MOCK = ("--model", "demo", "--worker-cls", "mock", "--mock-step-ms", "10", "--max-num-seqs", "16")
BODY: dict[str, Any] = {"model": "demo", "input": "Hello"}
LIMIT_S = 20.0


def kill_gateway(ring: Server) -> None:
    """Ends one with its program, and waits for its successor."""
    before = {pid for title, pid in ring.children().items() if "api_gateway" in title}
    os.kill(min(before), signal.SIGKILL)
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        now = {pid for title, pid in ring.children().items() if "blockyard: api_gateway" in title}
        if len(now) == len(before) and now != before:
            return
        time.sleep(0.02)
    raise AssertionError("the gateway was not started again")


def ask(url: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
    """Status and body of an answer of any gateway that is ready: each call has a connection of its own."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    end = time.monotonic() + LIMIT_S
    while True:
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as e:
            if e.code != 503 or time.monotonic() > end:
                return e.code, json.loads(e.read())
        except OSError:  # it reached the killed one
            if time.monotonic() > end:
                raise
        time.sleep(0.02)


def test_a_folder_keeps_responses_over_a_kill(tmp_path: Path) -> None:
    with serve(*MOCK, "--response-store", str(tmp_path)) as ring:
        url = f"{ring.url}/v1/responses"
        client = openai.OpenAI(base_url=f"{ring.url}/v1", api_key="none", max_retries=5)
        first = client.responses.create(**BODY, max_output_tokens=8)
        stream = client.responses.create(**BODY, max_output_tokens=2000, background=True, stream=True)
        begun = next(iter(stream))
        kill_gateway(ring)
        assert ask(f"{url}/{first.id}") == (200, first.to_dict())
        failed = client.responses.retrieve(begun.response.id)  # type: ignore[union-attr]
        assert failed.status == "failed" and failed.error is not None and "ended before it" in failed.error.message
        again = client.responses.retrieve(failed.id, stream=True, starting_after=5)
        assert [event.type for event in again] == ["response.failed"]
        more = client.responses.create(**BODY, max_output_tokens=8, previous_response_id=first.id)
        assert more.usage is not None and first.usage is not None
        assert more.usage.input_tokens > first.usage.input_tokens
        with pytest.raises(openai.BadRequestError):
            client.responses.create(**BODY, previous_response_id=failed.id)


def test_responses_in_memory_end_with_their_gateway() -> None:
    with serve(*MOCK, "--api-gateways", "2") as ring:
        url = f"{ring.url}/v1/responses"
        ids: dict[str, str] = {}  # by gateway
        while len(ids) < 2:
            status, made = ask(url, BODY | {"max_output_tokens": 2000, "background": True})
            assert status == 200, made
            ids[made["id"][:22]] = made["id"]
        for _ in range(6):  # each gateway is asked for both
            for response_id in ids.values():
                status, found = ask(f"{url}/{response_id}")
                assert status == 200 and found["status"] in ("queued", "in_progress", "incomplete"), found
        kill_gateway(ring)
        answers = [ask(f"{url}/{response_id}") for response_id in ids.values()]
        assert sorted(status for status, _ in answers) == [200, 404]
        for response_id in ids.values():  # the server waits for what runs
            ask(f"{url}/{response_id}/cancel", {})
        [lost] = [body["error"] for status, body in answers if status == 404]
        assert lost["code"] == "response_lost" and "was lost with the gateway process" in lost["message"]
