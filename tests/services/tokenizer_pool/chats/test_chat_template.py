"""Chat templates: the same text as transformers' `apply_chat_template`, and precise errors."""

import json
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from blockyard.services.tokenizer_pool.chats.chat_template import Chat, ChatTemplates
from blockyard.shared.errors import RequestError

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}

CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""

LLAMA3 = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message + "<|eot_id|>" }}
{%- set ns = namespace(turn=0) %}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (ns.turn % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- set ns.turn = ns.turn + 1 %}
    {%- if 'tool_calls' in message %}
        {%- for call in message.tool_calls %}
            {%- if loop.index > 3 %}{% break %}{% endif %}
            {{- '{"name": "' + call.function.name + '", "parameters": ' }}
            {{- call.function.arguments | tojson }}
            {{- "}<|eot_id|>" }}
        {%- endfor %}
    {%- else %}
        {%- generation %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
        {%- endgeneration %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

PARTS = """\
{% for message in messages %}
{{ message.role }}:
  {% for part in message.content %}
    {% if part.type == 'text' %}{{ part.text }}{% else %}<{{ part.type }}>{% endif %},
  {% endfor %}
{% endfor %}
"""

TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "a <b> & 'c' é", "parameters": {"x": [1, None]}},
}
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": " Be brief. "},
    {"role": "user", "content": "What's <b>2+2</b> & 東京?"},
    {"role": "assistant", "content": "4, of course  "},
]
CALLS: list[dict[str, Any]] = [
    {"role": "user", "content": "look"},
    {"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": {"x": "é", "y": [1]}}}] * 5},
]


def render(template: str, messages: list[dict[str, Any]] = CHAT, **options: Any) -> str:
    own = options.pop("own", None)
    chat = Chat(
        messages,
        options.pop("tools", []),
        options.pop("kwargs", {}),
        own,
        options.pop("add_generation_prompt", False),
        options.pop("continue_final_message", False),
    )
    return ChatTemplates({"default": template}, SPECIAL).render(chat, **options)


@pytest.mark.parametrize("template", [CHATML, LLAMA3], ids=["chatml", "llama3"])
@pytest.mark.parametrize(
    ("messages", "options"),
    [
        (CHAT, {}),
        (CHAT[:2], {"add_generation_prompt": True}),
        (CHAT[:2], {"add_generation_prompt": True, "kwargs": {"enable_thinking": False}}),
        (CHAT, {"continue_final_message": True}),
        (CHAT[1:2], {"tools": [TOOL]}),
    ],
    ids=["plain", "prompted", "kwargs", "continued", "tools"],
)
def test_same_as_transformers(
    byte_tokenizer: Tokenizer,
    template: str,
    messages: list[dict[str, Any]],
    options: dict[str, Any],
) -> None:
    reference = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer, **SPECIAL)
    asked = {k: v for k, v in options.items() if k != "kwargs"} | options.get("kwargs", {})
    expected = reference.apply_chat_template(messages, chat_template=template, tokenize=False, **asked)
    assert render(template, messages, **options) == expected


def test_tool_calls_are_as_in_transformers_and_their_arguments_may_be_text(byte_tokenizer: Tokenizer) -> None:
    reference = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer, **SPECIAL)
    expected = reference.apply_chat_template(CALLS, chat_template=LLAMA3, tokenize=False)
    assert render(LLAMA3, CALLS) == expected
    assert expected.count("look") == 4  # the user's message, and three calls until the break
    as_text = json.loads(json.dumps(CALLS))
    for call in as_text[1]["tool_calls"]:
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    assert render(LLAMA3, as_text) == expected


ITEMS = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.name }}"
    "{% for k, v in c.function.arguments.items() %} {{ k }}={{ v }}{% endfor %};{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("arguments", "as_json", "as_items"),
    [
        ('{"a":', '"{\\"a\\":"', ' arguments={"a":'),
        ("null", "{}", ""),
        ("", "{}", ""),
        ("[1]", '"[1]"', " arguments=[1]"),
        ('"{\\"a\\": 1}"', '{"a": 1}', " a=1"),
        ('"no"', '"no"', " arguments=no"),
    ],
)
def test_arguments_that_are_no_object(arguments: str, as_json: str, as_items: str) -> None:
    """Templates get the text; those that look into an object get one with the text in it."""
    calls = [{"function": {"name": "f", "arguments": one}} for one in (arguments, {"b": 2})]
    chat = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": calls}]
    assert f'{{"name": "f", "parameters": {as_json}}}' in render(LLAMA3, chat)
    assert render(ITEMS, chat) == f"f{as_items};f b=2;"


def test_content_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert "user\na\nb<|im_end|>" in render(CHATML, [{"role": "user", "content": parts}])
    image = [{"type": "image_url", "image_url": {"url": "x"}}, parts[0]]
    with pytest.raises(RequestError, match="image_url") as error:
        render(CHATML, [{"role": "user", "content": image}])
    assert error.value.field == "messages"
    shown = render(PARTS, [{"role": "user", "content": image}, {"role": "user", "content": "plain"}])
    assert shown.split() == ["user:", "<image_url>,", "a,", "user:", "plain,"]


def test_content_may_be_null() -> None:
    assert render(CHATML, [{"role": "assistant", "content": None}]) == "<|im_start|>assistant\n<|im_end|>\n"


def test_trimmed_final_message_is_continued() -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well  "}]
    assert render(CHATML, messages, continue_final_message=True).endswith("assistant\nWell  ")
    assert render(LLAMA3, messages, continue_final_message=True).endswith("\n\nWell")
    with pytest.raises(RequestError) as error:
        render("nothing", messages, continue_final_message=True)
    assert error.value.field == "continue_final_message"
    with pytest.raises(RequestError, match="both"):
        render(CHATML, messages, continue_final_message=True, add_generation_prompt=True)


def test_the_tool_template_is_picked_when_there_are_tools() -> None:
    templates = ChatTemplates({"default": "plain", "tool_use": "tools"}, SPECIAL)
    assert [templates.render(Chat(CHAT, t, {}, None, True, False)) for t in ([], [TOOL])] == ["plain", "tools"]
    assert templates.render(Chat(CHAT, [TOOL], {}, "own {{ bos_token }}", True, False)) == "own <s>"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('only users') }}", "only users"),
        ("{{ messages[7].content }}", "no element 7"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ 'a' + 1 }}", "concatenate"),
        ("{{ ''.__class__.__mro__ }}", "__class__"),
        ("{% set ns = namespace(__init__=1) %}", "__init__"),
        ("{{ messages.append(1) }}", "append"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
    ],
)
def test_a_template_that_fails_says_why(template: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as error:
        render(template)
    assert error.value.field == "messages"


@pytest.mark.parametrize("template", ["{% for %}", "{{ 'a' ", "{% unknown %}", "{{ " + "(" * 400 + ")" * 400 + " }}"])
def test_an_invalid_template(template: str) -> None:
    with pytest.raises(RequestError) as error:
        render("fine", own=template)
    assert error.value.field == "chat_template"
    assert render("fine") == "fine"


def test_the_output_is_bounded() -> None:
    template = "{% for i in range(1000) %}xxxxxxxxxx{% endfor %}"
    assert len(render(template)) == 10_000
    with pytest.raises(RequestError, match="more than 9999 characters"):
        render(template, max_chars=9999)


def test_bad_kwargs_and_no_messages() -> None:
    with pytest.raises(RequestError) as error:
        render(CHATML, kwargs={"messages": []})
    assert error.value.field == "chat_template_kwargs"
    with pytest.raises(RequestError) as error:
        render(CHATML, [])
    assert error.value.field == "messages"
    with pytest.raises(RequestError, match="chat-template"):
        ChatTemplates({}, SPECIAL).render(Chat(CHAT, [], {}, None, True, False))


def test_strftime_now() -> None:
    assert render("{{ strftime_now('%Y') }}").isdigit()


def test_a_malformed_template_is_found_before_the_first_request() -> None:
    with pytest.raises(RequestError, match="line 1"):
        ChatTemplates({"default": "{% for %}"}, SPECIAL).check()
    ChatTemplates({"default": CHATML}, SPECIAL).check()
