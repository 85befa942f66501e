"""/v1/responses over HTTP: its paths, headers, errors and the form of its events."""

import asyncio
from typing import Any

import msgspec

from blockyard.shared.messages import Generate, ToolDefaults
from blockyard.shared.token_ids import unpack

PARSERS = ToolDefaults(auto_choice=True, parser="hermes")
WEBSOCKET = {
    "Connection": "Upgrade",
    "Upgrade": "websocket",
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
}
KEY = {"Authorization": "Bearer k"}
PATH = "/v1/responses"


async def test_a_websocket_is_refused_and_the_connection_goes_on(rig) -> None:
    async with rig(api_keys=["k"]) as r:
        for _ in range(2):
            async with r.http.get(PATH, headers=WEBSOCKET | KEY) as response:
                body = msgspec.json.decode(await response.read())
                assert (response.status, response.headers["Upgrade"]) == (426, "HTTP/1.1")
                assert body["error"]["code"] == "upgrade_required"
        for headers, expected in ((KEY, 405), (WEBSOCKET, 401)):
            async with r.http.get(PATH, headers=headers) as response:
                assert response.status == expected
        status, _ = await r.post(PATH, {"input": "hi", "max_output_tokens": 1}, headers=KEY)
    assert status == 200


async def test_events_have_lines_of_their_type(rig) -> None:
    async with rig() as r, r.http.post(PATH, json={"input": "hi", "max_output_tokens": 2, "stream": True}) as response:
        assert response.headers["Content-Type"].startswith("text/event-stream")
        text = await response.text()
    for event in text.split("\n\n")[:-1]:
        kind, data = event.split("\n")
        assert kind.removeprefix("event: ") == msgspec.json.decode(data.removeprefix("data: "))["type"]
    assert "[DONE]" not in text


async def test_the_header_names_what_is_left_out(rig) -> None:
    body = {"input": "hi", "max_output_tokens": 1, "tools": [{"type": "web_search"}], "new_field": 1}
    async with rig() as r, r.http.post(PATH, json=body) as response:
        assert (response.status, response.headers["x-blockyard-ignored"]) == (200, "new_field, tools.web_search")
        assert (await response.json())["tools"] == []
    async with rig(strict_fields=True) as r:
        status, answer = await r.post(PATH, {"input": "hi", "tools": [{"type": "web_search"}]})
    assert (status, answer["error"]["param"]) == (400, "tools[0].type")


async def test_a_model_that_decides_about_calls_needs_a_parser(rig) -> None:
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}}
    async with rig() as r:
        status, answer = await r.post(PATH, {"input": "hi", "tools": [tool]})
        assert (status, answer["error"]["param"]) == (400, "tool_choice")
        status, _ = await r.post(PATH, {"input": "hi", "tools": [tool], "tool_choice": "none", "max_output_tokens": 1})
    assert status == 200


async def test_a_history_above_64_kib(rig) -> None:
    """The body is parsed by a process of its own."""
    call = {"type": "custom_tool_call", "call_id": "c", "name": "run", "input": "x" * 70_000}
    output = {"type": "custom_tool_call_output", "call_id": "c", "output": "y" * 70_000}
    body: dict[str, Any] = {
        "input": [call, output],
        "tools": [{"type": "custom", "name": "run"}],
        "max_output_tokens": 2,
    }
    async with rig(tools=PARSERS, max_model_len=200_000) as r:
        status, answer = await r.post(PATH, body)
        assert (status, answer["status"], answer["output"][0]["content"][0]["text"]) == (200, "incomplete", "w0 w1 ")
        status, answer = await r.post(PATH, body | {"input": [call, output | {"call_id": "d"}]})
    assert (status, answer["error"]["param"]) == (400, "input[1].call_id")


async def test_a_client_that_goes_away_cancels(rig) -> None:
    async with rig() as r:
        r.ring.step_s = 0.01
        async with r.http.post(PATH, json={"input": "hi", "max_output_tokens": 200, "stream": True}) as response:
            await response.content.readany()
            response.close()
        await r.until(lambda: not r.ring.running)
    assert len(r.ring.frames(Generate)) == 1


async def test_keep_alives_are_comments(rig) -> None:
    async with rig(keepalive_s=0.05) as r:
        r.ring.step_s = 0.4
        async with r.http.post(PATH, json={"input": "hi", "max_output_tokens": 2, "stream": True}) as response:
            async with asyncio.timeout(10):
                text = await response.text()
    events = [one for one in text.split("\n\n")[:-1] if not one.startswith(":")]
    assert ": keep-alive" in text
    numbers = [msgspec.json.decode(one.partition("data: ")[2])["sequence_number"] for one in events]
    assert numbers == list(range(len(events)))


async def test_a_last_turn_that_fits_without_room_for_the_whole_answer_is_no_error(rig) -> None:
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    last = {"role": "user", "content": "z" * 200}
    async with rig() as r:
        for items in ([last], [*turns, last]):
            body = {"input": items, "truncation": "auto"}
            statuses = [(await r.post(PATH, body | {"max_output_tokens": most}))[0] for most in (4, 100)]
            assert statuses == [200, 200]
        sent = [msgspec.json.decode(bytes(unpack(frame.prompt_ids))) for frame in r.ring.frames(Generate)]
        status, answer = await r.post(PATH, body | {"input": "z" * 300})
    assert all(messages[-1]["content"] == "z" * 200 for messages in sent)
    assert status == 400 and "maximum context length is 256 tokens" in answer["error"]["message"]


async def test_the_oldest_turns_of_a_conversation_that_does_not_fit_are_dropped(rig) -> None:
    def turns(count: int) -> list[Any]:
        return [{"role": role, "content": f"{role} {i}"} for i in range(count) for role in ("user", "assistant")]

    last = {"role": "user", "content": "now"}
    async with rig() as r:
        for count in range(12):
            body = {"instructions": "Rules.", "input": [*turns(count), last], "max_output_tokens": 6}
            status, answer = await r.post(PATH, body | {"truncation": "auto"})
            assert status == 200 and answer["truncation"] == "auto"
        sent = [msgspec.json.decode(bytes(unpack(frame.prompt_ids))) for frame in r.ring.frames(Generate)]
        status, answer = await r.post(PATH, body)
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        status, answer = await r.post(PATH, body | {"truncation": "auto", "input": "x" * 300})
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    for count, messages in enumerate(sent):
        said = [message["content"] for message in messages]
        assert said[0] == "Rules." and said[-1] == "now" and messages[1]["role"] == "user"
        everything = ["Rules.", *(one["content"] for one in turns(count)), "now"]
        assert all(text in everything for text in said) and len(msgspec.json.encode(messages)) <= 250
        dropped = len(everything) - len(said)
        if dropped:  # and no more than it takes
            assert len(msgspec.json.encode(messages)) > 250 - 2 * 45
        else:
            assert said == everything
