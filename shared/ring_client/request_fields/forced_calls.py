"""The grammar of an answer that has to be tool calls, or has to have valid calls.

Where the deployment has a format of tool calls, the format writes the grammar. Without one, as in vLLM: `required` is a
JSON list of `{"name": ..., "parameters": {...}}`, and a named function is the JSON object of its arguments alone. A
named custom tool is its text.
"""

from collections.abc import Callable
from typing import Any

import msgspec

from blockyard.shared.errors import RequestError
from blockyard.shared.messages import MAX_GRAMMAR_BYTES, Grammar, GrammarDefaults, GrammarEngine, GrammarKind
from blockyard.shared.ring_client.request_fields.output_format import CallForm, OutputForm, OutputFormats
from blockyard.shared.ring_client.request_fields.structured_outputs import FieldGrammar
from blockyard.shared.ring_client.request_fields.tool_schemas import moved
from blockyard.shared.ring_client.request_fields.tools import ToolMode, ToolUse
from blockyard.shared.tool_parsers.call_grammar import calls_source
from blockyard.shared.tool_parsers.grammar_rules import GrammarRules, any_of, arguments_schema, text_pattern
from blockyard.shared.tool_parsers.interface import ToolFormat
from blockyard.shared.tool_parsers.tools import TextGrammar, TextSyntax, Tool, ToolKind

MAX_CALLS = 32  # in one answer; without a bound some models never end the list


def calls_grammar(
    form: OutputForm | None,
    use: ToolUse,
    formats: OutputFormats,
    defaults: GrammarDefaults,
    other: FieldGrammar | None = None,
) -> FieldGrammar | None:
    """The grammar of an answer that calls tools. None where the model decides and nothing limits its calls or text.

    `other` limits the text: where the model decides, an answer is either calls or as `other` says, and arguments are
    valid for all tools. A forced call leaves no text. Raises RequestError.
    """
    if use.is_forced:
        other = None
    if form is None or form.calls != CallForm.FAMILY or formats.tools is None:
        return other or forced_grammar(use, defaults)
    only_texts = not use.is_forced and other is None and not any(tool.strict for tool in use.tools)
    if only_texts and all(text_pattern(tool) is None for tool in use.tools):
        return None
    field = "functions" if use.older else "tools"
    content = None if other is None else _content_rule(other, use, formats.tools, field)
    if use.is_forced:
        for tool in use.tools:
            _arguments(tool, field)  # refuses what the grammar would not enforce
    parallel = use.parallel and not use.older and use.mode != ToolMode.NAMED
    try:
        found = calls_source(formats.tools, use.tools, parallel, use.is_forced, content, only_texts)
    except RequestError:  # the format cannot enforce these tools
        if only_texts:  # the request asks for the texts alone
            return None
        raise
    except Exception as e:  # a format may be a user's: it ends this request and no other
        reason = f"--tool-call-parser {formats.tools.name} failed at these tools: {type(e).__name__}: {e}"
        raise RequestError(reason, field, status=422, code="output_parser_failed") from e
    if found is None:
        return None
    _check_size(found.source, field)
    # one engine alone enforces the language with the schemas in it, whatever the deployment's default is
    grammar = _grammar(GrammarKind.LARK, found.source, defaults) if other is None else other.grammar
    grammar = msgspec.structs.replace(
        grammar, kind=GrammarKind.LARK, source=found.source, engine=GrammarEngine.GUIDANCE, markers=found.markers
    )
    field = field if other is None else f"{other.field} and {field}"
    inner_end = formats.tools.reasoning_end if use.is_forced else ""
    return FieldGrammar(grammar, field, formats.tools.reads_reasoning, inner_end)


def _content_rule(
    other: FieldGrammar, use: ToolUse, tool_format: ToolFormat, field: str
) -> Callable[[GrammarRules], str]:
    """Writes the rule of text that another field limits, beside calls.

    Raises RequestError, also where calls begin like the text: a lexer takes all of a beginning and does not go back.
    """
    source, kind = other.grammar.source, other.grammar.kind
    openings = () if tool_format.openings is None else tool_format.openings(use.tools)
    if kind == GrammarKind.CHOICE and not openings:
        return lambda rules: any_of([rules.text(text) for text in msgspec.json.decode(source, type=list[str])])
    if kind in (GrammarKind.JSON_OBJECT, GrammarKind.JSON_SCHEMA):
        schema = _decoded_schema(source) if kind == GrammarKind.JSON_SCHEMA else {"type": "object"}
        begins = "{" if isinstance(schema, dict) and schema.get("type") == "object" else "{["
        if not any(text.startswith(tuple(begins)) for text in openings):
            return lambda rules: rules.json(schema)
    what = f"{other.field} ({kind.value})"
    raise RequestError(
        f"{what} and {field} cannot limit one answer in the format of {tool_format.name}: leave one of them out",
        other.field,
    )


def _decoded_schema(source: str) -> Any:
    """The schema; the text itself if it is no JSON, which is no schema either: the check of the grammar says so."""
    try:
        return msgspec.json.decode(source)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return source


def forced_grammar(use: ToolUse, defaults: GrammarDefaults) -> FieldGrammar | None:
    """None where nothing is forced, or any text is a call: a custom tool that is named and takes free text.

    Raises RequestError.
    """
    if not use.is_forced:
        return None
    field = "functions" if use.older else "tools"
    if use.mode == ToolMode.NAMED and use.tools[0].kind == ToolKind.CUSTOM:
        text = use.tools[0].grammar
        return None if text is None else FieldGrammar(_of_text(text, defaults, field), field)
    schema = _arguments(use.tools[0], field) if use.mode == ToolMode.NAMED else _calls(use, field)
    source = msgspec.json.encode(schema).decode()
    _check_size(source, field)
    return FieldGrammar(_grammar(GrammarKind.JSON_SCHEMA, source, defaults), field)


def _calls(use: ToolUse, field: str) -> dict[str, Any]:
    """Each tool's schema is a definition of the list's schema, and its references are to that place."""
    definitions = {f"tool{i}": moved(_arguments(t, field), f"#/$defs/tool{i}") for i, t in enumerate(use.tools)}
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool.name}, "parameters": {"$ref": f"#/$defs/tool{i}"}},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for i, tool in enumerate(use.tools)
    ]
    return {
        "type": "array",
        "minItems": 1,
        "maxItems": MAX_CALLS if use.parallel else 1,
        "items": {"anyOf": calls},
        "$defs": definitions,
    }


def _arguments(tool: Tool, field: str) -> dict[str, Any]:
    if tool.grammar is not None and text_pattern(tool) is None:
        raise RequestError(
            f"the Lark grammar of {tool.name} is recursive, or too large for a text within a call: it is enforced with "
            "a choice that names the tool alone",
            field,
        )
    return arguments_schema(tool)


def _of_text(text: TextGrammar, defaults: GrammarDefaults, field: str) -> Grammar:
    _check_size(text.definition, field)
    kind = GrammarKind.REGEX if text.syntax == TextSyntax.REGEX else GrammarKind.LARK
    return _grammar(kind, text.definition, defaults)


def _grammar(kind: GrammarKind, source: str, defaults: GrammarDefaults) -> Grammar:
    return Grammar(
        kind=kind,
        source=source,
        engine=defaults.engine,
        any_whitespace=defaults.any_whitespace,
        additional_properties=defaults.additional_properties,
    )


def _check_size(source: str, field: str) -> None:
    size = len(source.encode("utf-8", "surrogatepass"))
    if size > MAX_GRAMMAR_BYTES:
        raise RequestError(
            f"{field}: the grammar of these tools has {size} bytes; at most {MAX_GRAMMAR_BYTES} are allowed", field
        )
