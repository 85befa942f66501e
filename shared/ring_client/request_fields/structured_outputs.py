"""Structured output: reads the fields that limit an answer's tokens, in every spelling in use, into one `Grammar`.

`response_format` is OpenAI's field, `structured_outputs` and the older `guided_*` are vLLM's. A request has one of
them. Only the fields' form is checked here: whether an engine takes the grammar is checked by the tokenizer pool.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol

import msgspec

from blockyard.shared.errors import RequestError
from blockyard.shared.messages import MAX_GRAMMAR_BYTES, Grammar, GrammarDefaults, GrammarEngine, GrammarKind
from blockyard.shared.ring_client.request_fields.known_fields import read_raw

NonEmpty = Annotated[str, msgspec.Meta(min_length=1)]
JsonText = dict[str, Any] | str  # an object, or its JSON text
Engine = Literal["auto", "guidance", "xgrammar", "outlines", "lm-format-enforcer"]

# sources of `StructuredOutputsParams` and its older names
_SOURCES = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json_object": "json_object",
}


class StructuredOutputsParams(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """vLLM's `structured_outputs`. Exactly one of the first six is set; an engine of its own may be named."""

    json: JsonText | None = None  # a JSON schema
    regex: NonEmpty | None = None
    choice: Annotated[list[NonEmpty], msgspec.Meta(min_length=1)] | None = None
    grammar: NonEmpty | None = None  # EBNF as llama.cpp's GBNF, or Lark
    json_object: bool | None = None
    structural_tag: JsonText | None = None
    whitespace_pattern: NonEmpty | None = None
    disable_any_whitespace: bool | None = None  # None: the deployment's
    disable_additional_properties: bool | None = None
    disable_fallback: bool | None = None  # an engine that is named has no fallback here
    backend: Engine | None = None


class _JsonSchema(msgspec.Struct):
    schema: dict[str, Any]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None  # no effect: every schema is enforced


class _ResponseFormat(msgspec.Struct):
    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: _JsonSchema | None = None


class StructuredRequest(Protocol):
    """The fields of HTTP requests. A field that is not there is JSON's null."""

    @property
    def response_format(self) -> msgspec.Raw: ...
    @property
    def structured_outputs(self) -> msgspec.Raw: ...
    @property
    def guided_json(self) -> msgspec.Raw: ...
    @property
    def guided_regex(self) -> msgspec.Raw: ...
    @property
    def guided_choice(self) -> msgspec.Raw: ...
    @property
    def guided_grammar(self) -> msgspec.Raw: ...
    @property
    def guided_json_object(self) -> msgspec.Raw: ...
    @property
    def guided_whitespace_pattern(self) -> msgspec.Raw: ...
    @property
    def guided_decoding_backend(self) -> msgspec.Raw: ...


@dataclass(frozen=True, slots=True)
class FieldGrammar:
    """A grammar, and the request's field that it came from: errors of the grammar name it."""

    grammar: Grammar
    field: str
    allows_reasoning: bool = False  # it begins with the answer, and not behind the end of reasoning
    inner_end: str = ""  # the special token that ends the reasoning in it; empty: it has none, or any number of parts


def read_grammar(request: StructuredRequest, defaults: GrammarDefaults) -> FieldGrammar | None:
    """The grammar of an HTTP request; None if it asks for none. Raises RequestError."""
    found = [
        given
        for given in (
            _read_response_format(request, defaults),
            read_structured_outputs(_decoded(request, "structured_outputs"), defaults),
            *_read_guided(request, defaults),
        )
        if given is not None
    ]
    if len(found) > 1:
        raise RequestError(
            f"{found[0].field} and {found[1].field} both limit the answer: leave one of them out", found[1].field
        )
    return found[0] if found else None


def read_structured_outputs(
    value: object, defaults: GrammarDefaults, field: str = "structured_outputs"
) -> FieldGrammar | None:
    """Reads StructuredOutputsParams, or a mapping of its fields. Raises RequestError."""
    if value is None:
        return None
    try:
        asked = msgspec.convert(msgspec.to_builtins(value), StructuredOutputsParams)
    except msgspec.ValidationError as e:
        raise RequestError(f"{field}: {e}", field) from e
    names = [name for name in _SOURCES if getattr(asked, name) not in (None, False)]
    if len(names) != 1:
        said = " and ".join(names) if names else "none"
        raise RequestError(f"{field} needs exactly one of {', '.join(_SOURCES)}; it has {said}", field)
    where = f"{field}.{names[0]}"
    return FieldGrammar(_grammar(names[0], getattr(asked, names[0]), asked, defaults, where), where)


def _read_response_format(request: StructuredRequest, defaults: GrammarDefaults) -> FieldGrammar | None:
    value, field = _decoded(request, "response_format"), "response_format"
    if value is None:
        return None
    try:
        asked = msgspec.convert(value, _ResponseFormat)
    except msgspec.ValidationError as e:
        raise RequestError(f"{field}: {e}", field) from e
    match asked.type:
        case "text":
            return None
        case "json_object":
            return json_grammar(None, defaults, field)
        case "structural_tag":
            grammar = _grammar("structural_tag", value, StructuredOutputsParams(), defaults, field)
            return FieldGrammar(grammar, field)
    if asked.json_schema is None:
        raise RequestError("response_format of type json_schema needs json_schema", "response_format.json_schema")
    return json_grammar(asked.json_schema.schema, defaults, "response_format.json_schema.schema")


def json_grammar(schema: dict[str, Any] | None, defaults: GrammarDefaults, field: str) -> FieldGrammar:
    """JSON by this schema; None: any JSON object. Raises RequestError."""
    name, value = ("json_object", True) if schema is None else ("json", schema)
    return FieldGrammar(_grammar(name, value, StructuredOutputsParams(), defaults, field), field)


def _read_guided(request: StructuredRequest, defaults: GrammarDefaults) -> list[FieldGrammar]:
    shared = {
        name: value
        for name, value in (
            ("whitespace_pattern", _decoded(request, "guided_whitespace_pattern")),
            ("backend", _decoded(request, "guided_decoding_backend")),
        )
        if value is not None
    }
    found = []
    for field, name in _GUIDED.items():
        value = _decoded(request, field)
        if value is None or value is False:
            continue
        try:
            asked = msgspec.convert({name: value, **shared}, StructuredOutputsParams)
        except msgspec.ValidationError as e:
            at = _GUIDED_NAMES.get(str(e).rpartition("$.")[2].rstrip("`"), field)
            raise RequestError(f"{at}: {e}", at) from e
        found.append(FieldGrammar(_grammar(name, getattr(asked, name), asked, defaults, field), field))
    return found


_GUIDED_NAMES = {"whitespace_pattern": "guided_whitespace_pattern", "backend": "guided_decoding_backend"}


def _decoded(request: StructuredRequest, field: str) -> object:
    """The field's value, without keys that are null: clients send every field of their own types."""
    value: object = read_raw(getattr(request, field), field)
    return {key: item for key, item in value.items() if item is not None} if isinstance(value, dict) else value


def _grammar(name: str, value: Any, asked: StructuredOutputsParams, defaults: GrammarDefaults, field: str) -> Grammar:
    kind, source = _source(name, value, field)
    if len(source.encode("utf-8", "surrogatepass")) > MAX_GRAMMAR_BYTES:
        raise RequestError(f"{field} is longer than {MAX_GRAMMAR_BYTES} bytes", field)
    no_whitespace, no_additional = asked.disable_any_whitespace, asked.disable_additional_properties
    return Grammar(
        kind=kind,
        source=source,
        engine=GrammarEngine(asked.backend) if asked.backend is not None else defaults.engine,
        whitespace_pattern=asked.whitespace_pattern or "",
        any_whitespace=defaults.any_whitespace if no_whitespace is None else not no_whitespace,
        additional_properties=defaults.additional_properties if no_additional is None else not no_additional,
    )


def _source(name: str, value: Any, field: str) -> tuple[GrammarKind, str]:
    match name:
        case "json":
            return GrammarKind.JSON_SCHEMA, _json_text(value, field)
        case "structural_tag":
            return GrammarKind.STRUCTURAL_TAG, _json_text(value, field)
        case "json_object":
            return GrammarKind.JSON_OBJECT, ""
        case "choice":
            return GrammarKind.CHOICE, msgspec.json.encode(value).decode()
        case "regex":
            return GrammarKind.REGEX, value
    return (GrammarKind.EBNF if "::=" in value else GrammarKind.LARK), value


def _json_text(value: dict[str, Any] | str, field: str) -> str:
    """The JSON text of an object, in the order of its keys. Raises RequestError for text that is no JSON object."""
    if isinstance(value, str):
        try:
            decoded = msgspec.json.decode(value)
        except (msgspec.DecodeError, UnicodeEncodeError) as e:
            raise RequestError(f"{field} is not valid JSON: {e}", field) from e
        except RecursionError as e:
            raise RequestError(f"{field} is nested too deeply", field) from e
        if not isinstance(decoded, dict):
            raise RequestError(f"{field} must be a JSON object, got {type(decoded).__name__}", field)
        return value
    try:
        return msgspec.json.encode(value).decode()
    except RecursionError as e:
        raise RequestError(f"{field} is nested too deeply", field) from e
