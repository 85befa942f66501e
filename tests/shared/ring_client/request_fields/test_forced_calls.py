"""Which grammar an answer with tools gets, by the deployment's format and the request's choice."""

from typing import Any

import msgspec
import pytest

from blockyard.services.api_gateway.requests.schemas import ChatRequest
from blockyard.shared.errors import RequestError
from blockyard.shared.messages import Grammar, GrammarDefaults, GrammarEngine, GrammarKind, ToolDefaults
from blockyard.shared.ring_client.request_fields.forced_calls import calls_grammar, forced_grammar
from blockyard.shared.ring_client.request_fields.output_format import (
    CallForm,
    OutputForm,
    OutputFormats,
    call_id_form,
    format_names,
    prompt_markers,
    read_output_form,
    shown_special,
)
from blockyard.shared.ring_client.request_fields.structured_outputs import FieldGrammar
from blockyard.shared.ring_client.request_fields.tools import ToolUse, read_tools
from blockyard.shared.tool_parsers.call_grammar import calls_source
from blockyard.shared.tool_parsers.interface import CallId, ToolFormat
from blockyard.shared.tool_parsers.json_calls.families import HERMES

NONE = OutputFormats()
FAMILY = OutputFormats.load(ToolDefaults(parser="hermes"))
REASONS = OutputFormats.load(ToolDefaults(parser="hermes", reasoning_parser="qwen3"))
LARK = {"type": "grammar", "grammar": {"syntax": "lark", "definition": 'start: "a"'}}
RECURSIVE = {"type": "grammar", "grammar": {"syntax": "lark", "definition": 'start: "(" start? ")"'}}


def use(choice: Any, *tools: dict[str, Any], **fields: Any) -> ToolUse:
    given = tools or (function("a"), function("b"), custom("run"))
    body = {"tools": given, "tool_choice": choice} | fields
    found = read_tools(msgspec.json.decode(msgspec.json.encode(body), type=ChatRequest), ToolDefaults())
    assert found is not None
    return found


def function(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name} | fields}


def custom(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "custom", "custom": {"name": name} | fields}


def named(name: str, kind: str = "function") -> dict[str, Any]:
    return {"type": kind, kind: {"name": name}}


def grammar(choice: Any, formats: OutputFormats, *tools: dict[str, Any], **fields: Any) -> Grammar | None:
    asked = use(choice, *tools, **fields)
    found = calls_grammar(
        read_output_form(asked, formats), asked, formats, GrammarDefaults(engine=GrammarEngine.XGRAMMAR)
    )
    assert found is None or found.field == "tools"
    return None if found is None else found.grammar


def form(choice: Any, formats: OutputFormats, *tools: dict[str, Any]) -> CallForm | None:
    found = read_output_form(use(choice, *tools), formats)
    return None if found is None else found.calls


@pytest.mark.parametrize(
    ("choice", "without", "with_family"),
    [
        ("none", None, None),
        ("auto", None, CallForm.FAMILY),
        ("required", CallForm.LIST, CallForm.FAMILY),
        (named("a"), CallForm.ARGUMENTS, CallForm.FAMILY),
        (named("run", "custom"), CallForm.ARGUMENTS, CallForm.FAMILY),
    ],
)
def test_how_an_answer_writes_calls(choice: Any, without: CallForm | None, with_family: CallForm | None) -> None:
    assert (form(choice, NONE), form(choice, FAMILY)) == (without, with_family)


def test_a_named_tool_with_a_grammar_of_its_own_is_answered_by_that_text() -> None:
    tool, recursive = custom("run", format=LARK), custom("run", format=RECURSIVE)
    assert form(named("run", "custom"), FAMILY, tool) == CallForm.ARGUMENTS
    found = grammar(named("run", "custom"), FAMILY, tool)
    assert found is not None and (found.kind, found.source) == (GrammarKind.LARK, 'start: "a"')
    with pytest.raises(RequestError, match="Lark grammar of run") as e:
        grammar("required", FAMILY, recursive)
    assert e.value.field == "tools"
    assert grammar("required", FAMILY, tool) is not None and grammar("auto", FAMILY, recursive) is None


def test_forced_calls_have_the_grammar_of_the_family() -> None:
    for choice, parallel in (("required", True), (named("a"), False)):
        asked, found = use(choice), grammar(choice, FAMILY)
        expected = calls_source(HERMES, asked.tools, parallel, True)
        assert found is not None and expected is not None
        assert (found.source, found.markers) == (expected.source, expected.markers)
        assert (found.kind, found.engine) == (GrammarKind.LARK, GrammarEngine.GUIDANCE)
    alone, several = grammar("required", FAMILY, parallel_tool_calls=False), grammar("required", FAMILY)
    assert alone is not None and several is not None and alone.source != several.source


def test_without_a_family_they_have_that_of_json() -> None:
    found, expected = grammar("required", NONE), forced_grammar(use("required"), GrammarDefaults())
    assert found is not None and expected is not None
    assert (found.source, found.kind) == (expected.grammar.source, GrammarKind.JSON_SCHEMA)


def test_strict_tools_have_a_grammar_where_the_model_decides() -> None:
    assert grammar("auto", FAMILY) is None
    strict = [function("a", strict=True), function("b")]
    found, expected = grammar("auto", FAMILY, *strict), calls_source(HERMES, use("auto", *strict).tools, True, False)
    assert found is not None and expected is not None and found.source == expected.source
    assert grammar("none", FAMILY, *strict) is None


@pytest.mark.parametrize("kind", list(GrammarKind))
def test_where_the_model_decides_both_fields_hold_or_both_are_named(kind: GrammarKind) -> None:
    sources = {GrammarKind.JSON_SCHEMA: '{"type": "object"}\n', GrammarKind.CHOICE: '["a", "b\\n"]'}
    other = FieldGrammar(Grammar(kind, sources.get(kind, "x"), any_whitespace=False), "response_format")
    asked, without = use("auto", function("a", strict=True)), use("auto")
    form_of = read_output_form(asked, FAMILY)

    def limits(tools: ToolUse) -> FieldGrammar | None:
        return calls_grammar(form_of, tools, FAMILY, GrammarDefaults(), other)

    if kind not in (GrammarKind.JSON_SCHEMA, GrammarKind.JSON_OBJECT, GrammarKind.CHOICE):
        with pytest.raises(RequestError, match=r"response_format .* and tools cannot limit one answer") as e:
            limits(asked)
        assert (e.value.status, e.value.field) == (400, "response_format")
        return
    for tools in (asked, without):
        found = limits(tools)
        assert found is not None and found.field == "response_format and tools"
        assert (found.grammar.kind, found.grammar.engine) == (GrammarKind.LARK, GrammarEngine.GUIDANCE)
        assert not found.grammar.any_whitespace and found.grammar.markers == ["<tool_call>", "</tool_call>"]
        assert " | " in found.grammar.source.partition("\n")[0]
    llama = OutputFormats.load(ToolDefaults(parser="llama3_json"))
    with pytest.raises(RequestError, match=r"response_format .* and tools cannot .* the format of llama3_json"):
        calls_grammar(form_of, asked, llama, GrammarDefaults(), other)
    assert calls_grammar(None, without, NONE, GrammarDefaults(), other) is other


@pytest.mark.parametrize("formats", [NONE, FAMILY, REASONS], ids=["none", "hermes", "qwen3"])
@pytest.mark.parametrize("choice", ["required", named("a"), named("run", "custom")])
def test_a_forced_call_has_no_text_that_another_field_limits(choice: Any, formats: OutputFormats) -> None:
    other = FieldGrammar(Grammar(GrammarKind.REGEX, "x"), "response_format")
    asked = use(choice)
    found = calls_grammar(read_output_form(asked, formats), asked, formats, GrammarDefaults(), other)
    assert found == calls_grammar(read_output_form(asked, formats), asked, formats, GrammarDefaults())
    assert found is None or found.field == "tools"


def test_a_format_that_cannot_write_its_grammar_fails_the_request_by_name() -> None:
    def broken(*_: Any) -> str:
        raise KeyError("oh")

    formats = OutputFormats(ToolFormat("frail", "none", HERMES.read, broken))
    with pytest.raises(RequestError, match="--tool-call-parser frail failed at these tools: KeyError: 'oh'") as e:
        grammar("required", formats)
    assert (e.value.status, e.value.field) == (422, "tools")


def test_tools_that_a_format_cannot_enforce_are_refused() -> None:
    formats = OutputFormats.load(ToolDefaults(parser="glm45"))
    day = {"type": "string", "format": "date", "maxLength": 6}  # no text is
    parameters = {"type": "object", "properties": {"day": day}, "required": ["day"]}
    with pytest.raises(RequestError, match="the arguments of a: no arguments that are valid") as e:
        grammar("required", formats, function("a", parameters=parameters))
    assert (e.value.status, e.value.field) == (400, "tools")
    assert grammar("required", formats, function("a", parameters={**parameters, "required": []})) is not None


def test_what_the_formats_need() -> None:
    both, calls, reasoning = (
        OutputForm(CallForm.FAMILY, True),
        OutputForm(CallForm.FAMILY, False),
        OutputForm(CallForm.NONE, True),
    )
    think, call = ["</think>", "<think>"], ["</tool_call>", "<tool_call>"]
    assert shown_special(both, REASONS) == sorted(think + call)
    assert (shown_special(calls, REASONS), shown_special(reasoning, REASONS)) == (call, think)
    assert (prompt_markers(both, REASONS), prompt_markers(calls, REASONS)) == (["<think>", "</think>"], [])
    assert format_names(both, REASONS) == "--reasoning-parser qwen3 and --tool-call-parser hermes"
    assert call_id_form(NONE) == call_id_form(REASONS) == CallId.OPENAI
