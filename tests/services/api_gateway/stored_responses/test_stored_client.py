"""The official client, unmodified, with stored responses: read, continued, listed, deleted, and of several keys."""

import json
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
from openai.types.responses import Response, ResponseItem
from pydantic import TypeAdapter

from blockyard.services.api_gateway.stored_responses.disk_store import DiskStore
from blockyard.services.api_gateway.stored_responses.response_store import StoreLimits
from blockyard.shared.messages import Tokenize, ToolDefaults

ITEM: TypeAdapter[Any] = TypeAdapter(ResponseItem)
PARSERS = ToolDefaults(auto_choice=True, parser="hermes", reasoning_parser="qwen3", reasoning_end="</think>")
TOOL: dict[str, Any] = {
    "type": "function",
    "name": "f",
    "description": "Does f.",
    "parameters": {"type": "object", "properties": {"a": {"type": "string"}}},
    "strict": False,
}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "b"}}\n</tool_call>'
END = {"stop": "<end>"}


def answers(ring: Any, *texts: str) -> None:
    """Answers the requests with these texts, in order of their arrival."""
    given: dict[str, str] = {}

    def script(request_id: str, index: int) -> str:
        text = given.setdefault(request_id, texts[min(len(given), len(texts) - 1)])
        return text[index] if index < len(text) else "<end>"

    ring.script = script


def prompts(ring: Any) -> list[Any]:
    return [json.loads(frame.messages) for frame in ring.frames(Tokenize)]


async def test_a_response_is_stored_until_it_is_deleted(rig, client) -> None:
    async with rig() as r, client(r) as c:
        made = await c.responses.create(model="tiny", input="hi", max_output_tokens=3, metadata={"a": "b"})
        found = await c.responses.retrieve(made.id)
        assert found.to_dict() == made.to_dict() and found.to_dict()["store"] is True
        Response.model_validate(found.to_dict())
        not_stored = await c.responses.create(model="tiny", input="hi", max_output_tokens=3, store=False)
        with pytest.raises(openai.NotFoundError, match="There is no response"):
            await c.responses.retrieve(not_stored.id)
        await c.responses.delete(made.id)
        for use in (c.responses.retrieve, c.responses.delete, c.responses.cancel, c.responses.input_items.list):
            with pytest.raises(openai.NotFoundError):
                await use(made.id)
        for wrong in ("resp_1", "x", "resp_" + "f" * 40, "resp_" + "\u00e9" * 16):
            with pytest.raises(openai.NotFoundError):
                await c.responses.retrieve(wrong)


@pytest.mark.parametrize("stream", [False, True])
async def test_turns_with_tools_go_on_by_the_id_alone(rig, client, stream: bool) -> None:
    async with rig(tools=PARSERS, max_model_len=20_000) as r, client(r) as c:
        answers(r.ring, f"<think>So.</think>{CALL}", "It is x.", "Bye.")
        fields: dict[str, Any] = {"model": "tiny", "tools": [TOOL], "extra_body": END}

        async def create(**more: Any) -> Response:
            if not stream:
                return await c.responses.create(**fields, **more)
            events = [event async for event in await c.responses.create(stream=True, **fields, **more)]
            return events[-1].response

        first = await create(input="What is a?", instructions="Be brief.")
        call = first.output[-1]
        assert call.type == "function_call" and first.output[0].type == "reasoning"
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "x"}
        second = await create(input=[output], previous_response_id=first.id, instructions="Be kind.")
        third = await create(input="Thanks", previous_response_id=second.id)
        assert (await c.responses.retrieve(third.id)).previous_response_id == second.id
        one, two, three = prompts(r.ring)
        listed = [item async for item in c.responses.input_items.list(third.id, order="asc", limit=2)]
        own = await c.responses.input_items.list(first.id)
    roles = [[message["role"] for message in each] for each in (one, two, three)]
    assert roles[0] == ["system", "user"] and roles[1] == ["system", "user", "assistant", "tool"]
    assert roles[2] == ["user", "assistant", "tool", "assistant", "user"]
    assert two[0]["content"] == "Be kind." and two[1:] == three[:3] and one[1] == two[1]
    assert two[2]["reasoning_content"] == "So." and two[2]["tool_calls"][0]["function"]["name"] == "f"
    assert three[3]["content"] == "It is x." and three[4]["content"] == "Thanks"
    kinds = ["message", "reasoning", "function_call", "function_call_output", "message", "message"]
    assert [item.type for item in listed] == kinds
    for item in listed:
        ITEM.validate_python(item.to_dict())
    assert len({item.id for item in listed}) == 6
    assert [item.to_dict() for item in own.data] == [listed[0].to_dict()] and own.has_more is False


async def test_pages_of_input_items(rig, client) -> None:
    async with rig() as r, client(r) as c:
        items = [{"role": "user", "content": str(i), "id": f"m{i}", "type": "message"} for i in range(5)]
        made = await c.responses.create(model="tiny", input=items, max_output_tokens=1)
        page = await c.responses.input_items.list(made.id, limit=2)
        assert ([item.id for item in page.data], page.has_more) == (["m4", "m3"], True)
        page = await page.get_next_page()
        assert ([item.id for item in page.data], page.has_more) == (["m2", "m1"], True)
        assert [item.id async for item in c.responses.input_items.list(made.id, order="asc", after="m2")] == [
            "m3",
            "m4",
        ]
        last = await c.responses.input_items.list(made.id, after="m0", include=["reasoning.encrypted_content"])
        assert (last.data, last.has_more) == ([], False)
        for wrong, field in (
            ({"after": "m9"}, "after"),
            ({"limit": 0}, "limit"),
            ({"limit": 101}, "limit"),
            ({"order": "up"}, "order"),
            ({"include": ["x"]}, "include"),
        ):
            with pytest.raises(openai.BadRequestError) as caught:
                await c.responses.input_items.list(made.id, **wrong)
            assert caught.value.param == field


async def test_a_response_belongs_to_its_key(rig, client) -> None:
    async with rig(api_keys=["one", "two"]) as r, client(r, "one") as mine, client(r, "two") as other:
        made = await mine.responses.create(model="tiny", input="hi", max_output_tokens=1)
        for use in (other.responses.retrieve, other.responses.delete, other.responses.cancel):
            with pytest.raises(openai.NotFoundError):
                await use(made.id)
        with pytest.raises(openai.NotFoundError):
            await other.responses.input_items.list(made.id)
        with pytest.raises(openai.NotFoundError) as caught:
            await other.responses.create(model="tiny", input="hi", previous_response_id=made.id)
        assert (caught.value.param, caught.value.code) == ("previous_response_id", "previous_response_not_found")
        assert (await mine.responses.retrieve(made.id)).id == made.id


async def test_the_least_recently_used_is_dropped(rig, client) -> None:
    async with rig(max_stored_responses=3) as r, client(r) as c:
        ids = [(await c.responses.create(model="tiny", input="hi", max_output_tokens=1)).id for _ in range(3)]
        await c.responses.retrieve(ids[0])
        await c.responses.create(model="tiny", input="hi", max_output_tokens=1)
        with pytest.raises(openai.NotFoundError, match="--max-stored-responses"):
            await c.responses.retrieve(ids[1])
        assert [(await c.responses.retrieve(ids[i])).id for i in (0, 2)] == [ids[0], ids[2]]


async def test_bad_continuations(rig, client, tmp_path: Path) -> None:
    async with rig(max_model_len=2000, response_store=str(tmp_path)) as r, client(r) as c:

        async def fails(status: int, field: str, code: str | None = None, **fields: Any) -> None:
            with pytest.raises(openai.APIStatusError) as caught:
                await c.responses.create(**{"model": "tiny", "input": "hi", "max_output_tokens": 1} | fields)
            error = caught.value
            assert (error.status_code, error.param) == (status, field), error
            assert code is None or error.code == code

        first = await c.responses.create(model="tiny", input=[{"role": "user", "content": "a", "id": "m1"}])
        same = [{"role": "user", "content": "b", "id": "m1"}]
        await fails(400, "input[0].id", input=same, previous_response_id=first.id)
        item = first.output[0].to_dict()
        await fails(400, "input[0].id", input=[item], previous_response_id=first.id)
        both = {"conversation": "conv_1", "previous_response_id": first.id}
        await fails(400, "previous_response_id", "mutually_exclusive_parameters", **both)
        await fails(404, "previous_response_id", "previous_response_not_found", previous_response_id="resp_1")
        await fails(404, "previous_response_id", "previous_response_not_found", previous_response_id="")
        await fails(400, "previous_response_id", extra_body={"previous_response_id": 1})
        await fails(400, "background", background=True, store=False)
        escaped = b'{"input": "hi", "previous_response_i\\u0064": "%b"}' % first.id.encode()
        status, answer = await r.post("/v1/responses", escaped)
        assert (status, answer["error"]["param"]) == (400, "previous_response_id")
        # an id is free again once its response is deleted
        a = await c.responses.create(model="tiny", input="hi", extra_body={"request_id": "a"}, max_output_tokens=1)
        await fails(400, "request_id", extra_body={"request_id": "a"})
        b = await c.responses.create(model="tiny", input="hi", previous_response_id=a.id, max_output_tokens=1)
        await c.responses.delete(a.id)
        await fails(404, "previous_response_id", previous_response_id=b.id)
        a2 = {"request_id": "a"}
        await fails(404, "previous_response_id", previous_response_id=b.id, extra_body=a2)
        again = await c.responses.create(model="tiny", input="hi", extra_body=a2, max_output_tokens=1)
        assert again.id == a.id
        assert len((await c.responses.input_items.list(b.id)).data) == 3
        store = DiskStore(tmp_path, StoreLimits(100, 2**20, 60.0), 1)  # of another gateway
        one = store.get(a.id)
        assert one is not None
        store.put(msgspec.structs.replace(one, previous=b.id))  # as two requests at a time might
        store.close()
        await fails(400, "previous_response_id", previous_response_id=b.id)
        with pytest.raises(openai.BadRequestError, match="comes before itself"):
            await c.responses.input_items.list(a.id)


async def test_references_to_stored_items(rig, client) -> None:
    """Clients may send the ids of the items of earlier turns in place of the items."""
    async with rig(tools=PARSERS, max_model_len=20_000) as r, client(r) as c:
        answers(r.ring, CALL, "It is x.")
        fields: dict[str, Any] = {"model": "tiny", "tools": [TOOL], "extra_body": END}
        first = await c.responses.create(input="What is a?", **fields)
        [asked] = (await c.responses.input_items.list(first.id)).data
        call = first.output[-1]
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "x"}  # type: ignore[union-attr]
        given = [{"type": "item_reference", "id": one.id} for one in (asked, call)] + [output]
        second = await c.responses.create(input=given, **fields)
        one, two = prompts(r.ring)
        assert two[: len(one)] == one and [message["role"] for message in two] == ["user", "assistant", "tool"]
        kinds = [item.type for item in (await c.responses.input_items.list(second.id, order="asc")).data]
        assert kinds == ["message", "function_call", "function_call_output"]
        unknown = [f"msg_{first.id.removeprefix('resp_')}_o09", "msg_1", f"fc_{'s' + 'f' * 40}_o00", "", "\u00e9_o1"]
        for wrong in unknown:
            with pytest.raises(openai.NotFoundError) as caught:
                await c.responses.create(input=[output, {"type": "item_reference", "id": wrong}], **fields)
            assert caught.value.param == "input[1].id"
        with pytest.raises(openai.BadRequestError):
            await c.responses.create(input=[{"type": "item_reference"}], **fields)


async def test_the_number_of_input_tokens(rig, client) -> None:
    async with rig(max_model_len=2000) as r, client(r) as c:
        first = await c.responses.create(model="tiny", input="hi", max_output_tokens=3)
        for previous in (None, first.id):
            fields: dict[str, Any] = {"model": "tiny", "input": "so?", "previous_response_id": previous}
            counted = await c.responses.input_tokens.count(**fields, personality="friendly")
            usage = (await c.responses.create(**fields, max_output_tokens=1)).usage
            assert usage is not None and usage.input_tokens == counted.input_tokens > 3
        assert counted.object == "response.input_tokens"


async def test_without_stored_responses(rig, client) -> None:
    async with rig(max_stored_responses=0) as r, client(r) as c:
        made = await c.responses.create(model="tiny", input="hi", max_output_tokens=1)
        assert made.to_dict()["store"] is False
        for field, value in (("background", True), ("previous_response_id", made.id)):
            with pytest.raises(openai.BadRequestError, match="--max-stored-responses") as caught:
                await c.responses.create(model="tiny", input="hi", extra_body={field: value})
            assert caught.value.param == field
        with pytest.raises(openai.NotFoundError):
            await c.responses.retrieve(made.id)
