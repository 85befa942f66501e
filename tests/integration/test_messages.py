"""The official `anthropic` client, unmodified, against a ring with the demo model.

The demo model was not trained to call tools: the grammar of forced calls gives its answers their form.
"""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from rig import serve

QUESTION = "Which of the files has the longest line?"
SCHEMA = {
    "type": "object",
    "properties": {
        "path": {"type": "string", "maxLength": 24},
        "first": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["path", "first"],
    "additionalProperties": False,
}
TOOLS: Any = [{"name": "read_file", "description": "Reads a file.", "input_schema": SCHEMA}]
BLOCK = 16  # tokens


@pytest.fixture(scope="module")
def client() -> Iterator[anthropic.Anthropic]:
    flags = (
        "--dtype",
        "float32",
        "--tool-call-parser",
        "auto",
        "--enable-auto-tool-choice",
        "--block-size",
        str(BLOCK),
    )
    with (
        serve("demo", *flags) as server,
        anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as made,
    ):
        yield made


def asked(messages: list[Any], seed: int = 0, **more: Any) -> dict[str, Any]:
    choice = {"type": "any", "disable_parallel_tool_use": True}
    fields: dict[str, Any] = {"model": "demo", "messages": messages, "tools": TOOLS, "tool_choice": choice}
    return fields | {"max_tokens": 300, "extra_body": {"seed": seed}} | more


def prompt_tokens(usage: Any) -> int:
    return int(usage.input_tokens + usage.cache_read_input_tokens)


def test_an_agent_whose_turns_find_the_prompt_before_in_the_cache(client: anthropic.Anthropic) -> None:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    ids, before = set(), 0
    for turn in range(5):
        with client.messages.stream(**asked(messages, turn, system="Be brief.")) as stream:
            pieces = [event.partial_json for event in stream if event.type == "input_json"]
            answer = stream.get_final_message()
        whole = client.messages.create(**asked(messages, turn, system="Be brief."))
        [call], [same] = answer.content, whole.content
        assert (call.type, call.name, call.input) == ("tool_use", "read_file", same.input)
        assert call.input == json.loads("".join(pieces)) and set(call.input) == {"path", "first"} and len(pieces) > 1
        assert answer.stop_reason == whole.stop_reason == "tool_use"
        counted = client.messages.count_tokens(model="demo", messages=messages, tools=TOOLS, system="Be brief.")
        assert counted.input_tokens == prompt_tokens(answer.usage) == prompt_tokens(whole.usage)
        assert answer.usage.cache_read_input_tokens >= before // BLOCK * BLOCK
        before = prompt_tokens(answer.usage)
        ids.add(call.id)
        messages.append({"role": "assistant", "content": answer.content})
        result = {"type": "tool_result", "tool_use_id": call.id, "content": f"line {turn}", "is_error": turn == 2}
        messages.append({"role": "user", "content": [result]})
        if turn % 2:
            messages.append({"role": "system", "content": "The user has opened another file."})
    assert len(ids) == 5
    last = client.messages.create(**asked(messages, tool_choice={"type": "none"}, max_tokens=8))
    assert [block.type for block in last.content] == ["text"]


def test_a_schema_limits_the_answer(client: anthropic.Anthropic) -> None:
    config: Any = {"format": {"type": "json_schema", "schema": SCHEMA}}
    answer = client.messages.create(
        model="demo", max_tokens=300, messages=[{"role": "user", "content": QUESTION}], output_config=config
    )
    assert set(json.loads(answer.content[0].text)) == {"path", "first"}


def test_an_answer_is_continued(client: anthropic.Anthropic) -> None:
    messages: list[Any] = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": "It is the file"}]
    answer = client.messages.create(model="demo", max_tokens=4, messages=messages)
    assert answer.content[0].text and answer.stop_reason in ("max_tokens", "end_turn")


def test_a_prompt_that_does_not_fit(client: anthropic.Anthropic) -> None:
    length = client.models.retrieve("demo").max_input_tokens or 0
    for words in (length, 40 * length):  # the second is not read to its end
        long: Any = [{"role": "user", "content": "word " * words}]
        with pytest.raises(anthropic.BadRequestError) as refused:
            client.messages.create(model="demo", max_tokens=4, messages=long)
        said = refused.value.api_message or ""
        assert said.startswith("prompt is too long: ") and said.endswith(" maximum"), said
        number, most = (int(word) for word in said.split() if word.isdigit())
        assert number > most >= length
    counted = client.messages.count_tokens(model="demo", messages=[{"role": "user", "content": "word " * length}])
    assert counted.input_tokens > length
