"""Prompts and conversations in all their forms."""

from typing import Any

import msgspec
import numpy as np
import pytest

from blockyard.services.offline.prompts import ChatOptions, Prompt, read_conversations, read_prompts, with_token_ids
from blockyard.shared.errors import RequestError
from blockyard.shared.token_ids import unpack

USER = {"role": "user", "content": "hi"}
CHAT = ChatOptions()


def shown(prompts: list[Prompt]) -> list[tuple[str, str | list[int], str | None]]:
    return [(p.where, p.work.text or unpack(p.work.token_ids or b""), p.text) for p in prompts]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("one", [("prompts", "one", "one")]),
        (["one", "two"], [("prompts[0]", "one", "one"), ("prompts[1]", "two", "two")]),
        ([5, 6], [("prompts", [5, 6], None)]),
        ([[5, 6], "x", (7,)], [("prompts[0]", [5, 6], None), ("prompts[1]", "x", "x"), ("prompts[2]", [7], None)]),
        ({"prompt": "one"}, [("prompts", "one", "one")]),
        ({"prompt_token_ids": [5]}, [("prompts", [5], None)]),
        ([{"prompt": "as shown", "prompt_token_ids": [5]}], [("prompts[0]", [5], "as shown")]),
        ({"prompt": "one", "multi_modal_data": None}, [("prompts", "one", "one")]),
        ([], []),
    ],
)
def test_forms_of_prompts(given: object, expected: list[Any]) -> None:
    assert shown(read_prompts(given, "tiny")) == expected


@pytest.mark.parametrize(
    ("given", "field", "text"),
    [
        (None, "prompts", "got NoneType"),
        (b"bytes", "prompts", "got bytes"),
        ("", "prompts", "empty"),
        (["a", ""], "prompts[1]", "empty"),
        (["a", []], "prompts[1]", "empty"),
        (["a", 5], "prompts[1]", "got int"),
        ([["a"]], "prompts[0]", "not a list of token ids"),
        ([[-1]], "prompts[0]", "not a list of token ids"),
        ([[2**40]], "prompts[0]", "not a list of token ids"),
        ([{}], "prompts[0]", "needs prompt or prompt_token_ids"),
        ({"prompt": 5}, "prompts.prompt", "got int"),
        ({"prompt": "a", "color": "red"}, "prompts", "'color'"),
        ({"prompt": "a", "multi_modal_data": {"image": 1}}, "prompts.multi_modal_data", "not built"),
        ({"prompt": "a", "cache_salt": ""}, "cache_salt", "characters"),
        ({"prompt": "a", "cache_salt": 5}, "prompts.cache_salt", "got int"),
    ],
)
def test_invalid_prompts(given: object, field: str, text: str) -> None:
    with pytest.raises(RequestError) as caught:
        read_prompts(given, "tiny")
    assert caught.value.field == field and text in str(caught.value)


def test_one_conversation_or_many() -> None:
    options = ChatOptions("{{ t }}", add_generation_prompt=False, template_kwargs={"depth": 3})
    (one,) = read_conversations([{"role": "system", "content": "be brief"}, USER], options, "tiny")
    assert msgspec.json.decode(one.work.messages or b"") == [{"role": "system", "content": "be brief"}, USER]
    assert (one.work.chat_template, one.work.add_generation_prompt, one.work.want_text) == ("{{ t }}", False, True)
    assert msgspec.json.decode(one.work.template_kwargs) == {"depth": 3}
    many = read_conversations([[USER], [{"role": "user", "content": [{"type": "text", "text": "yo"}]}]], CHAT, "tiny")
    assert [p.where for p in many] == ["messages[0]", "messages[1]"]
    assert msgspec.json.decode(many[1].work.messages or b"") == [{"role": "user", "content": "yo"}]
    assert read_conversations([], CHAT, "tiny") == []


@pytest.mark.parametrize(
    ("given", "field", "text"),
    [
        ("hi", "messages", "got str"),
        ([[USER], [USER, {"role": "user"}]], "messages[1][1].content", "content is missing"),
        ([{"content": "x"}], "messages", "`role` - at `messages[0]`"),
        ([[]], "messages[0]", "empty"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], "messages[0].content[0].type", ""),
        ([{"role": "user", "content": object()}], "messages", "object"),
    ],
)
def test_invalid_conversations(given: object, field: str, text: str) -> None:
    with pytest.raises(RequestError) as caught:
        read_conversations(given, CHAT, "tiny")
    assert caught.value.field == field and text in str(caught.value)


def test_an_answer_is_begun_or_continued() -> None:
    with pytest.raises(RequestError, match="cannot both"):
        read_conversations([USER], ChatOptions(continue_final_message=True), "tiny")
    (one,) = read_conversations([USER], ChatOptions(None, False, True), "tiny")
    assert one.work.continue_final_message and not one.work.add_generation_prompt


def test_any_role_goes_to_the_template() -> None:
    (one,) = read_conversations([{"role": "wizard", "content": "x"}], CHAT, "tiny")
    assert one.work.messages == b'[{"role":"wizard","content":"x"}]'


def test_unknown_fields_of_messages_are_ignored_with_a_warning() -> None:
    message = USER | {"id": 1, "content": [{"type": "text", "text": "yo", "cache_control": {}}]}
    with pytest.warns(UserWarning, match=r"ignored: id, content\.cache_control$"):
        (one,) = read_conversations([message], CHAT, "tiny")
    assert one.work.messages == b'[{"role":"user","content":"yo"}]'


def test_tools_of_a_conversation_reach_the_template() -> None:
    tools = ({"type": "function", "function": {"name": "find"}},)
    (one,) = read_conversations([USER], ChatOptions(tools=tools), "tiny")
    assert msgspec.json.decode(one.work.tools) == list(tools)
    assert read_conversations([USER], ChatOptions(tools=[]), "tiny")[0].work.tools == b""
    for wrong, field in (
        ([{}], "tools[0].type"),
        ([tools[0], tools[0]], "tools[1].function.name"),
        ([{1}, {2}], "tools[0]"),
    ):
        with pytest.raises(RequestError) as e:
            read_conversations([USER], ChatOptions(tools=wrong), "tiny")
        assert e.value.field == field


def test_ids_of_numpy() -> None:
    def ids(prompts: Any) -> list[list[int]]:
        return [unpack(one.work.token_ids or b"") for one in read_prompts(prompts, "tiny")]

    assert ids(np.array([1, 2])) == ids([np.int64(1), 2]) == ids({"prompt_token_ids": np.array([1, 2])}) == [[1, 2]]
    assert ids(np.array([[1, 2], [3, 4]])) == ids([np.array([1, 2]), [np.int32(3), 4]]) == [[1, 2], [3, 4]]
    combined = with_token_ids(None, np.array([[1, 2], [3, 4]]))
    assert ids(combined) == [[1, 2], [3, 4]]
    with pytest.raises(RequestError, match="not a list of token ids"):
        ids([np.array([0.5])])
