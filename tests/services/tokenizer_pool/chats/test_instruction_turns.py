"""Instructions between turns: they stay in place, or join a neighbour, and prompts stay prefixes of each other."""

import random
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from blockyard.services.tokenizer_pool.chats import chat_template
from blockyard.services.tokenizer_pool.chats.chat_template import Chat, ChatTemplates
from blockyard.services.tokenizer_pool.chats.instruction_turns import (
    InstructionTurns,
    place_instructions,
    probe_template,
)

ANY_ROLE = """\
{%- for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls or [] %}[{{ c.function.name }}]\
{% endfor %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""

# like Qwen's: other roles vanish, results are in a user's turn, reasoning is shown behind the user's last message alone
QWEN = """\
{%- if messages[0].role == 'system' %}{{ '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{% endif %}
{%- set ns = namespace(last=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- elif m.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.last and m.reasoning_content %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}
{{- m.content }}
{%- for c in m.tool_calls or [] %}{{ '<tool_call>' + c.function.name + '</tool_call>' }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- elif m.role == 'tool' %}
{%- if messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>' + m.content + '</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# the same, with an error for a system message that is not the first
HEAD_ALONE = QWEN.replace(
    "{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}",
    "{%- if m.role == 'system' and not loop.first %}{{ raise_exception('System message must be at the beginning.') }}"
    "{%- elif m.role == 'user' %}",
)

# like Gemma's: no system message, and turns that alternate
ALTERNATING = """\
{%- if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}
{{- '<turn>' + m.role + '\\n' + m.content + '<end>\\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<turn>model\\n' }}{% endif %}"""

# like Llama 2's: what the system says is within the user's turn
WITHIN = """\
{%- set ns = namespace(said='') %}
{%- for m in messages %}
{%- if m.role == 'system' %}{% set ns.said = ns.said + '<<SYS>>' + m.content + '<</SYS>>' %}
{%- elif m.role == 'user' %}{{ '[INST]' + ns.said + m.content + '[/INST]' }}{% set ns.said = '' %}
{%- else %}{{ m.content + '</s>' }}{% endif %}
{%- endfor %}"""

# parts in place of texts; a developer's messages are the only instructions
PARTS = """\
{%- for m in messages %}{% if m.role != 'system' or loop.first %}<|{{ m.role }}|>\
{% for part in m.content %}{{ part.text }}|{% endfor %}<|end|>{% endif %}{% endfor %}"""

CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: Any, role: str = "system") -> dict[str, Any]:
    return {"role": role, "content": text}


def answer(text: str = "", *calls: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, "tool_calls": list(calls)} | more


def result(text: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "c1", "content": text}


@cache
def templates_of(template: str) -> ChatTemplates:
    return ChatTemplates({"default": template}, {})


def render(template: str, messages: list[dict[str, Any]]) -> str:
    return templates_of(template).render(Chat(messages, [], {}, None, True, False))


def roles(template: str, messages: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    """Roles and contents of the messages that the template gets."""
    placed: list[dict[str, Any]] = []

    def place(messages: list[dict[str, Any]], turns: Callable[[], InstructionTurns]) -> list[dict[str, Any]]:
        placed[:] = place_instructions(messages, turns)
        return placed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chat_template, "place_instructions", place)
        render(template, messages)
    return [(message["role"], message["content"]) for message in placed]


@pytest.mark.parametrize(
    ("template", "between"),
    [
        (ANY_ROLE, {"system": "system", "developer": "developer"}),
        (QWEN, {"system": "system", "developer": "system"}),
        (HEAD_ALONE, {}),
        (ALTERNATING, {}),
        (WITHIN, {}),
        (PARTS, {"system": "developer", "developer": "developer"}),
    ],
    ids=["any role", "qwen", "head alone", "alternating", "within", "parts"],
)
def test_probes_find_what_a_template_renders_as_a_turn(
    template: str, between: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[InstructionTurns] = []

    def probe(render: Callable[[list[dict[str, Any]]], str]) -> InstructionTurns:
        found.append(probe_template(render))
        return found[-1]

    monkeypatch.setattr(chat_template, "probe_template", probe)
    templates = ChatTemplates({"default": template}, {})
    for _ in range(2):
        templates.render(Chat([user("u"), said("i")], [], {}, None, True, False))
    [turns] = found
    assert turns.between == between


def test_a_template_is_not_probed_for_conversations_without_instructions_between() -> None:
    def probes() -> InstructionTurns:
        raise AssertionError

    messages = [said("s"), user("u"), answer("a", CALL), result("r"), user("v")]
    assert place_instructions(messages, probes) is messages


def test_an_instruction_stays_where_it_is_as_a_turn() -> None:
    messages = [said("head"), user("u"), answer("a"), said("now"), user("v"), said("then", "developer")]
    assert roles(QWEN, messages) == [
        (m["role"] if m["role"] != "developer" else "system", m["content"]) for m in messages
    ]
    assert render(QWEN, messages).endswith(
        "<|im_start|>system\nnow<|im_end|>\n<|im_start|>user\nv<|im_end|>\n<|im_start|>system\nthen<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_an_instruction_joins_a_neighbour() -> None:
    head, first = said("head"), user("u")
    for messages, expected in (
        ([head, first, said("i")], [("system", "head"), ("user", "u\n\ni")]),
        ([head, said("i"), first], [("system", "head"), ("user", "i\n\nu")]),
        ([head, first, answer("a"), said("i"), said("j", "developer"), user("v")], [("user", "i\n\nj\n\nv")]),
        ([head, first, answer("", CALL), result("r"), said("i")], [("tool", "r\n\ni")]),
        (
            [head, first, answer("", CALL), said("i"), result("r"), result("q"), answer("b")],
            [("tool", "q\n\ni"), ("assistant", "b")],
        ),
        ([head, first, answer("a"), said("i"), answer("b")], [("user", "i"), ("assistant", "b")]),
        ([head, first, answer("a"), said("i"), said("j")], [("assistant", "a"), ("user", "i\n\nj")]),
        (
            [head, first, said([{"type": "text", "text": "i"}])],
            [("user", [{"type": "text", "text": "u"}, {"type": "text", "text": "i"}])],
        ),
        ([head, first, said("")], [("user", "u")]),
        ([head, first, answer("", CALL), result(None), said("i")], [("tool", "i")]),
    ):
        assert roles(HEAD_ALONE, messages)[-len(expected) :] == expected
        assert len(render(HEAD_ALONE, messages)) > 20


def test_no_instruction_stands_between_a_call_and_its_result() -> None:
    messages = [said("s"), user("u"), answer("", CALL), said("i"), result("r"), said("j"), result("q"), answer("b")]
    expected = ["system", "user", "assistant", "tool", "tool", "system", "system", "assistant"]
    assert [role for role, _ in roles(QWEN, messages)] == expected
    assert render(QWEN, messages).count("<tool_response>") == 2


def test_a_developer_at_the_head_is_shown_by_templates_that_know_system_alone() -> None:
    messages = [said("be brief", "developer"), user("u")]
    assert "system\nbe brief" in render(QWEN, messages)
    assert "<|developer|>be brief" in render(ANY_ROLE, messages)


def test_a_final_message_that_an_instruction_joined_is_continued() -> None:
    chat = Chat([user("u"), answer("a"), said("go on")], [], {}, None, False, True)
    assert ChatTemplates({"default": HEAD_ALONE}, {}).render(chat).endswith("<|im_start|>user\ngo on")


@pytest.mark.parametrize("template", [ANY_ROLE, QWEN, HEAD_ALONE])
def test_prompts_of_a_growing_conversation_are_prefixes_of_each_other(template: str) -> None:
    for seed in range(40):
        draw = random.Random(seed)
        messages = [said("head"), user("question")]
        messages += [said("reminder 0")] * draw.randint(0, 1)
        earlier = ""
        for turn in range(5):
            prompt = render(template, messages)
            assert prompt.startswith(earlier), (seed, turn)
            assert all(prompt.count(message["content"]) == 1 for message in messages[:2])
            earlier = prompt
            calls = [CALL] * draw.randint(1, 3)
            messages.append(answer(draw.choice(["", "Let me see."]), *calls, reasoning_content=None))
            instructions = [said(f"reminder {turn + 1}", draw.choice(["system", "developer"]))] * draw.randint(0, 2)
            results = [result(f"r{i}") for i in range(len(calls))]
            place = draw.randint(0, len(results))
            messages += [*results[:place], *instructions, *results[place:]]
