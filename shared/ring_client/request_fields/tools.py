"""The tools of a chat request, and which of them the answer may or must call.

`tools` and `tool_choice` are OpenAI's fields; its older `functions` and `function_call` are read into the same
`ToolUse`. Only the fields' form is checked here: whether an engine takes a schema is checked by the tokenizer pool.
"""

import enum
import string
from typing import Any, Literal, Protocol

import msgspec

from blockyard.shared.errors import RequestError
from blockyard.shared.messages import ToolDefaults
from blockyard.shared.ring_client.request_fields.known_fields import read_raw
from blockyard.shared.ring_client.request_fields.tool_schemas import check_parameters, with_json_types
from blockyard.shared.tool_parsers.tools import CUSTOM_INPUT, TextGrammar, Tool, ToolKind

MAX_TOOLS = 1024
MAX_TOOLS_BYTES = 2 << 20  # of all definitions as JSON
MAX_NAME_CHARS = 128
NAME_CHARS = frozenset(string.ascii_letters + string.digits + "_.:-")
TEXT_PARAMETERS = {"type": "object", "properties": {CUSTOM_INPUT: {"type": "string"}}, "required": [CUSTOM_INPUT]}


class ToolMode(enum.StrEnum):
    NONE = "none"  # the answer calls no tool
    AUTO = "auto"  # the model decides
    REQUIRED = "required"  # at least one call
    NAMED = "named"  # one call of the only allowed tool


class ToolUse(msgspec.Struct, frozen=True):
    mode: ToolMode
    tools: list[Tool]  # that the answer may call; not empty, unless the mode is NONE
    template_tools: bytes  # JSON list of all tools, as chat templates show them; empty: the template shows none
    parallel: bool = True  # several calls in one answer
    older: bool = False  # the request has `functions`: the answer has `function_call`
    field: str = "tool_choice"  # that chose
    most_calls: int | None = None  # calls that are shown of one answer; None: all

    @property
    def max_calls(self) -> int | None:
        return self.most_calls if self.parallel and not self.older else 1

    @property
    def is_forced(self) -> bool:
        return self.mode in (ToolMode.REQUIRED, ToolMode.NAMED)


class ToolRequest(Protocol):
    """The fields of HTTP requests. A field that is not there is JSON's null."""

    @property
    def tools(self) -> msgspec.Raw: ...
    @property
    def tool_choice(self) -> msgspec.Raw: ...
    @property
    def functions(self) -> msgspec.Raw: ...
    @property
    def function_call(self) -> msgspec.Raw: ...
    @property
    def parallel_tool_calls(self) -> bool | None: ...


class _NamedFunction(msgspec.Struct):
    name: str


class _TextFormat(msgspec.Struct, frozen=True):
    type: Literal["text", "grammar"]
    grammar: TextGrammar | None = None


class _Custom(msgspec.Struct):
    name: str
    format: _TextFormat = _TextFormat("text")


class _Choice(msgspec.Struct):
    """`tool_choice` as an object, and an entry of its `allowed_tools`."""

    type: Literal["function", "custom", "allowed_tools"]
    function: _NamedFunction | None = None
    custom: _NamedFunction | None = None
    allowed_tools: "_Allowed | None" = None


class _Allowed(msgspec.Struct):
    mode: Literal["auto", "required"]
    tools: list[_Choice]


def read_tools(request: ToolRequest, defaults: ToolDefaults) -> ToolUse | None:
    """The tools of an HTTP request; None if it has none. Raises RequestError."""
    tools, choice = read_raw(request.tools, "tools"), read_raw(request.tool_choice, "tool_choice")
    functions, call = read_raw(request.functions, "functions"), read_raw(request.function_call, "function_call")
    is_older = bool(functions) or call is not None
    if is_older and (tools or choice is not None):
        field = "functions" if functions else "function_call"
        raise RequestError(f"{field} is an older name of tools and tool_choice: use one form", field)
    field, choice_field = ("functions", "function_call") if is_older else ("tools", "tool_choice")
    given, choice = (functions, call) if is_older else (tools, choice)
    read = _read_list(given, field, is_older)
    if not read:
        if choice not in (None, "none"):
            raise RequestError(f"{choice_field} needs {field}", choice_field)
        return None
    mode, chosen = _read_choice(choice, [tool for tool, _ in read], choice_field, is_older)
    shown = b"" if mode == ToolMode.NONE and defaults.exclude_when_none else _shown(read, field)
    return ToolUse(mode, chosen, shown, request.parallel_tool_calls is not False, is_older, choice_field)


def read_offered_tools(tools: object) -> ToolUse | None:
    """Tools of which the model decides whether to call them. None without tools. Raises RequestError."""
    read = _read_list(tools, "tools", False)
    return ToolUse(ToolMode.AUTO, [tool for tool, _ in read], _shown(read, "tools")) if read else None


def encode_shown_tools(shown: list[dict[str, Any]], field: str) -> bytes:
    """Returns `ToolUse.template_tools`. Raises RequestError."""
    encoded = msgspec.json.encode(shown)
    if len(encoded) > MAX_TOOLS_BYTES:
        raise RequestError(f"{field} has {len(encoded)} bytes; at most {MAX_TOOLS_BYTES} are allowed", field)
    return encoded


def check_tool_name(name: object, where: str) -> str:
    """Raises RequestError for any other value than the name of a tool."""
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME_CHARS or not NAME_CHARS.issuperset(name):
        raise RequestError(
            f"a tool's name has 1 to {MAX_NAME_CHARS} letters, digits or any of _ . : -, got {str(name)[:40]!r}", where
        )
    return name


def _read_list(given: object, field: str, is_older: bool) -> list[tuple[Tool, dict[str, Any]]]:
    if given is None:
        return []
    if not isinstance(given, list):
        raise RequestError(f"{field} must be a list, got {_type(given)}", field)
    if len(given) > MAX_TOOLS:
        raise RequestError(f"{field} has at most {MAX_TOOLS} entries, got {len(given)}", field)
    if is_older:
        given = [{"type": "function", "function": function} for function in given]
    read = [_tool(tool, f"{field}[{i}]", is_older) for i, tool in enumerate(given)]
    _check_names([tool for tool, _ in read], field, is_older)
    return read


def _shown(read: list[tuple[Tool, dict[str, Any]]], field: str) -> bytes:
    return encode_shown_tools([tool for _, tool in read], field)


def _tool(value: object, where: str, is_older: bool) -> tuple[Tool, dict[str, Any]]:
    """A tool, and the form of it that chat templates show."""
    if not isinstance(value, dict):
        raise RequestError(f"a tool must be an object, got {_type(value)}", where)
    kind = value.get("type")
    if kind not in (ToolKind.FUNCTION, ToolKind.CUSTOM):
        raise RequestError(f"a tool has the type function or custom, got {str(kind)[:40]!r}", f"{where}.type")
    at, inner = (where if is_older else f"{where}.{kind}"), value.get(kind)
    if not isinstance(inner, dict):
        raise RequestError(f"a tool of type {kind} needs the object {kind}, got {_type(inner)}", at)
    name = check_tool_name(inner.get("name"), f"{at}.name")
    if not isinstance(inner.get("description", ""), str | None):
        raise RequestError("a tool's description is a text", f"{at}.description")
    return _custom(inner, name, at) if kind == ToolKind.CUSTOM else function_tool(inner, name, at)


def function_tool(inner: dict[str, Any], name: str, at: str) -> tuple[Tool, dict[str, Any]]:
    """The tool of these fields, and the form of it that chat templates show. Raises RequestError."""
    parameters, strict = inner.get("parameters"), inner.get("strict")
    if not isinstance(strict, bool | None):
        raise RequestError(f"strict is true or false, got {_type(strict)}", f"{at}.strict")
    if parameters is None:
        parameters = {"type": "object", "properties": {}}
    check_parameters(parameters, f"{at}.parameters")
    shown = {key: item for key, item in inner.items() if item is not None and key != "strict"}
    return Tool(ToolKind.FUNCTION, name, with_json_types(parameters), bool(strict)), {
        "type": "function",
        "function": shown,
    }


def _custom(inner: dict[str, Any], name: str, at: str) -> tuple[Tool, dict[str, Any]]:
    try:
        asked = msgspec.convert({key: item for key, item in inner.items() if item is not None}, _Custom)
    except msgspec.ValidationError as e:
        raise RequestError(f"{at}: {e}", f"{at}.format") from e
    if asked.format.type == "grammar" and asked.format.grammar is None:
        raise RequestError("a format of type grammar needs the field grammar", f"{at}.format.grammar")
    grammar = asked.format.grammar if asked.format.type == "grammar" else None
    return custom_tool(name, inner.get("description") or "", grammar)


def custom_tool(name: str, description: str, grammar: TextGrammar | None) -> tuple[Tool, dict[str, Any]]:
    """Templates know functions alone: they show a custom tool as a function with the text as argument."""
    shown = {"name": name, "description": description, "parameters": TEXT_PARAMETERS}
    return Tool(ToolKind.CUSTOM, name, TEXT_PARAMETERS, False, grammar), {"type": "function", "function": shown}


def _check_names(tools: list[Tool], field: str, is_older: bool) -> None:
    known: dict[str, int] = {}
    for i, tool in enumerate(tools):
        if tool.name in known:
            inner = "" if is_older else f".{tool.kind}"
            raise RequestError(f"two tools have the name {tool.name!r}", f"{field}[{i}]{inner}.name")
        known[tool.name] = i


def _read_choice(value: object, tools: list[Tool], field: str, is_older: bool) -> tuple[ToolMode, list[Tool]]:
    """The mode, and the tools that the answer may call."""
    if value is None or value == "auto":
        return ToolMode.AUTO, tools
    if value == "none":
        return ToolMode.NONE, []
    if value == "required" and not is_older:
        return ToolMode.REQUIRED, tools
    words = "none, auto or an object" if is_older else "none, auto, required or an object"
    if not isinstance(value, dict):
        raise RequestError(f"{field} is {words}, got {str(value)[:40]!r}", field)
    try:
        choice = msgspec.convert({"type": "function", "function": value} if is_older else value, _Choice)
    except msgspec.ValidationError as e:
        raise RequestError(f"{field}: {e}", field) from e
    if choice.type != "allowed_tools":
        return ToolMode.NAMED, [_named(choice, tools, field)]
    allowed = choice.allowed_tools
    if allowed is None or not allowed.tools:
        raise RequestError("allowed_tools needs a mode and a list of tools", f"{field}.allowed_tools")
    names = {_named(one, tools, f"{field}.allowed_tools.tools[{i}]").name for i, one in enumerate(allowed.tools)}
    return ToolMode(allowed.mode), [tool for tool in tools if tool.name in names]


def _named(choice: _Choice, tools: list[Tool], where: str) -> Tool:
    named = choice.custom if choice.type == "custom" else choice.function
    if named is None:
        raise RequestError("a choice needs the type function or custom, and an object of that name", where)
    for tool in tools:
        if tool.name == named.name and tool.kind == choice.type:
            return tool
    raise RequestError(f"no {choice.type} of the request has the name {named.name[:128]!r}", where)


def _type(value: object) -> str:
    names = {str: "a text", list: "a list", dict: "an object", type(None): "null", bool: "a boolean"}
    return names.get(type(value), "a number")
