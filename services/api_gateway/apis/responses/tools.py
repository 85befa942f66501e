"""The tools of a request: the tools that the answer may call, and the names of tools that are left out.

A `namespace` groups tools that are called by their own names. The client itself runs `tool_search`: the tools that it
finds are in an item of the input. They are shown there and not among the others, so that the prompt of a turn stays the
beginning of the next one's. Items `additional_tools` at the head of the input count as the request's field: Codex sends
its tools so for some models, and a chat template explains how to call a tool only beside the tools that it is given.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import msgspec

from blockyard.services.api_gateway.apis.responses.schemas import InputItem, ResponsesRequest, placed
from blockyard.shared.errors import RequestError
from blockyard.shared.messages import ToolDefaults
from blockyard.shared.ring_client.request_fields.tools import (
    MAX_TOOLS,
    ToolMode,
    ToolUse,
    check_tool_name,
    custom_tool,
    encode_shown_tools,
    function_tool,
)
from blockyard.shared.tool_parsers.tools import TextGrammar, TextSyntax, Tool, ToolKind

# tools that a server would run, by the beginning of their type
SERVER_TOOLS = (
    "apply_patch",
    "code_interpreter",
    "computer",
    "file_search",
    "image_generation",
    "local_shell",
    "mcp",
    "programmatic_tool_calling",
    "shell",
    "web_search",
)
SEARCH = "tool_search"
SEARCH_PARAMETERS = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
LOADED = ("tool_search_output", "additional_tools")  # items of the input that bring tools


class ToolKey(NamedTuple):
    """How clients name a tool."""

    namespace: str  # empty: none
    name: str


@dataclass(slots=True)
class OfferedTool:
    """A tool that the answer may call."""

    key: ToolKey
    tool: Tool  # under the name that the model knows
    shown: dict[str, Any]  # as chat templates show it
    loaded_by: int | None  # the item of the conversation that brought it; None: the request's field


@dataclass(slots=True)
class ResponseTools:
    use: ToolUse | None
    offered: list[OfferedTool]
    given: list[Any]  # the entries of the request's field that count
    ignored: list[str]  # types of tools and items that were left out
    names: dict[ToolKey, str]  # that the model knows
    brought: dict[int, list[dict[str, Any]]]  # the tools in an item of the conversation, as templates show tools
    leading: frozenset[int]  # items at its head; their tools are shown with the field's
    searches: bool  # the client searches for tools

    def shown_name(self, namespace: str | None, name: str) -> str:
        """The name of an earlier call in the prompt, also of a tool that is not offered any more."""
        return self.names.get(ToolKey(namespace or "", name), name)


class _CustomFormat(msgspec.Struct):
    type: Literal["text", "grammar"]
    syntax: TextSyntax | None = None
    definition: str | None = None


class _Chosen(msgspec.Struct):
    """`tool_choice` as an object, and an entry of allowed tools."""

    type: str
    name: str | None = None
    namespace: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: "list[_Chosen] | None" = None


class _Entry(NamedTuple):
    """A definition that names one tool."""

    value: dict[str, Any]
    where: str
    namespace: str
    about: str  # the description of the namespace, for its first tool
    loaded_by: int | None


def read_response_tools(
    request: ResponsesRequest, history: Sequence[InputItem], defaults: ToolDefaults, strict: bool
) -> ResponseTools:
    """Raises RequestError. `history`: items before the input. `strict`: a tool that would be left out is an error."""
    reader = _ToolReader(strict)
    if len(request.tools or ()) > MAX_TOOLS:
        raise RequestError(f"tools has at most {MAX_TOOLS} entries, got {len(request.tools or ())}", "tools")
    for i, value in enumerate(request.tools or ()):
        if reader.read(value, f"tools[{i}]", None):
            reader.given.append(value)
    items = list(placed(history, request.input))
    leading = frozenset(_leading([item for _where, item in items]))
    for i, (where, item) in enumerate(items):
        if item.type in LOADED:
            _read_loaded(reader, item, where, None if i in leading else i)
    found, brought = reader.found()
    offered = [one for one in found if one.loaded_by is not None or not reader.is_hidden(one.key)]
    names = {one.key: one.tool.name for one in found}
    use = _use(request, offered, defaults)
    return ResponseTools(use, offered, reader.given, reader.ignored, names, brought, leading, reader.searches)


def _leading(items: Sequence[InputItem]) -> Iterator[int]:
    """The items `additional_tools` that only other instructions stand before."""
    for i, item in enumerate(items):
        if item.type == "additional_tools":
            yield i
        elif item.role not in ("system", "developer"):
            return


def _read_loaded(reader: "_ToolReader", item: InputItem, where: str, loaded_by: int | None) -> None:
    if item.type == "tool_search_output" and item.execution == "server":
        return
    for j, value in enumerate(item.tools or ()):
        reader.read(value, f"{where}.tools[{j}]", loaded_by)


class _ToolReader:
    """Collects definitions. Names are settled at the end, when all are known."""

    def __init__(self, strict: bool) -> None:
        self._strict = strict
        self._entries: list[_Entry] = []
        self._hidden: set[ToolKey] = set()  # the model learns of these by a search
        self.searches = False
        self.given: list[Any] = []
        self.ignored: list[str] = []

    def read(self, value: Any, where: str, loaded_by: int | None) -> bool:
        """Whether the entry counts. Raises RequestError."""
        if not isinstance(value, dict):
            raise RequestError(f"a tool must be an object, got {type(value).__name__}", where)
        kind = value.get("type")
        match kind:
            case "function" | "custom":
                self._entries.append(_Entry(value, where, "", "", loaded_by))
            case "namespace":
                self._read_namespace(value, where, loaded_by)
            case "tool_search" if value.get("execution") == "client":
                self.searches = True
                self._entries.append(_Entry(value, where, "", "", loaded_by))
            case "tool_search":
                return self._leave_out(SEARCH, where)
            case str() if kind.startswith(SERVER_TOOLS):
                return self._leave_out(kind, where)
            case _:
                raise RequestError(f"a tool of the type {str(kind)[:40]!r} is not known", f"{where}.type")
        return True

    def found(self) -> tuple[list[OfferedTool], dict[int, list[dict[str, Any]]]]:
        """Returns all tools, and the tools that each item of the input brought. Raises RequestError.

        Where two tools have one name, the tool without a namespace keeps it, or the earlier one: a tool that is found
        later does not change the names of the tools before it.
        """
        keys = [ToolKey(one.namespace, _name(one)) for one in self._entries]
        known = {key.name for key in keys if not key.namespace}
        found: dict[ToolKey, OfferedTool] = {}
        brought: dict[int, list[dict[str, Any]]] = {}
        for key, entry in zip(keys, self._entries, strict=True):
            earlier = found.get(key)
            if earlier is not None and entry.where.startswith("tools"):
                raise RequestError(f"two tools have the name {key.name!r}", f"{entry.where}.name")
            if earlier is None or (earlier.loaded_by is None and self.is_hidden(key)):
                name = self._settled(key, earlier, known, entry.where)
                earlier = found[key] = OfferedTool(key, *_tool(entry, name), entry.loaded_by)
                if entry.value.get("defer_loading") is True:
                    self._hidden.add(key)
            if entry.loaded_by is not None:
                brought.setdefault(entry.loaded_by, []).append(earlier.shown)
        if len(found) > MAX_TOOLS:
            raise RequestError(f"a request has at most {MAX_TOOLS} tools, got {len(found)}", "tools")
        return list(found.values()), brought

    def _settled(self, key: ToolKey, earlier: OfferedTool | None, known: set[str], where: str) -> str:
        """Returns the name that the model knows, and adds it to the known names."""
        if earlier is not None:
            return earlier.tool.name
        name = key.name
        if key.namespace and name in known:
            name = check_tool_name(f"{key.namespace}__{name}", f"{where}.name")
            if name in known:
                raise RequestError(f"two tools have the name {name!r}", f"{where}.name")
        known.add(name)
        return name

    def is_hidden(self, key: ToolKey) -> bool:
        """Whether the model learns of the tool by a search alone."""
        return self.searches and key in self._hidden

    def _read_namespace(self, value: dict[str, Any], where: str, loaded_by: int | None) -> None:
        namespace = check_tool_name(value.get("name"), f"{where}.name")
        tools, about = value.get("tools"), value.get("description")
        if not isinstance(tools, list):
            raise RequestError("a namespace has a list of tools", f"{where}.tools")
        if not isinstance(about, str | None):
            raise RequestError("a namespace's description is a text", f"{where}.description")
        for j, inner in enumerate(tools):
            at = f"{where}.tools[{j}]"
            if not isinstance(inner, dict) or inner.get("type") not in ("function", "custom"):
                raise RequestError("a tool of a namespace has the type function or custom", f"{at}.type")
            self._entries.append(_Entry(inner, at, namespace, (about or "") if j == 0 else "", loaded_by))

    def _leave_out(self, kind: str, where: str) -> bool:
        if self._strict:
            raise RequestError(f"this server does not run tools of the type {kind[:40]}", f"{where}.type")
        self.ignored.append(f"tools.{kind[:40]}")
        return False


def _name(entry: _Entry) -> str:
    if entry.value["type"] == SEARCH:
        return SEARCH
    return check_tool_name(entry.value.get("name"), f"{entry.where}.name")


def _tool(entry: _Entry, name: str) -> tuple[Tool, dict[str, Any]]:
    value, where = entry.value, entry.where
    about = value.get("description")
    if not isinstance(about, str | None):
        raise RequestError("a tool's description is a text", f"{where}.description")
    if entry.namespace:
        head = f"Namespace {entry.namespace}" + (f": {entry.about}" if entry.about else "")
        about = f"{head}\n{about}" if about else head
    if value["type"] == "custom":
        return custom_tool(name, about or "", _text_grammar(value.get("format"), f"{where}.format"))
    parameters = value.get("parameters")
    if value["type"] == SEARCH and parameters is None:
        parameters = SEARCH_PARAMETERS
    fields = {"name": name, "description": about, "parameters": parameters, "strict": value.get("strict")}
    return function_tool(fields, name, where)


def _text_grammar(value: object, where: str) -> TextGrammar | None:
    if value is None:
        return None
    try:
        asked = msgspec.convert(value, _CustomFormat)
    except msgspec.ValidationError as e:
        raise RequestError(f"{where}: {e}", where) from e
    if asked.type == "text":
        return None
    if asked.syntax is None or asked.definition is None:
        raise RequestError("a format of type grammar needs syntax and definition", where)
    return TextGrammar(asked.syntax, asked.definition)


def _use(request: ResponsesRequest, offered: Sequence[OfferedTool], defaults: ToolDefaults) -> ToolUse | None:
    mode, chosen = _choice(request.tool_choice, offered)
    if not offered:
        return None
    shown = [] if mode == ToolMode.NONE and defaults.exclude_when_none else offered
    listed = [one.shown for one in shown if one.loaded_by is None]
    return ToolUse(
        mode,
        [one.tool for one in chosen],
        encode_shown_tools(listed, "tools") if listed else b"",
        request.parallel_tool_calls is not False,
        most_calls=request.max_tool_calls,
    )


def _choice(value: object, offered: Sequence[OfferedTool]) -> tuple[ToolMode, Sequence[OfferedTool]]:
    """The mode, and the tools that the answer may call."""
    where = "tool_choice"
    match value:
        case "none":
            return ToolMode.NONE, []
        case None | "auto":
            return ToolMode.AUTO, offered
        case "required":
            if not offered:
                raise RequestError('tool_choice "required" needs tools that this server can offer', where)
            return ToolMode.REQUIRED, offered
        case dict():
            pass
        case _:
            raise RequestError(f"tool_choice is none, auto, required or an object, got {str(value)[:40]!r}", where)
    try:
        asked = msgspec.convert(value, _Chosen)
    except msgspec.ValidationError as e:
        raise RequestError(f"{where}: {e}", where) from e
    if asked.type != "allowed_tools":
        return ToolMode.NAMED, [_named(asked, offered, where)]
    allowed = list(_allowed(asked, offered))
    if asked.mode == "required":
        if not allowed:
            raise RequestError("allowed_tools of mode required have none that this server can offer", f"{where}.tools")
        return ToolMode.REQUIRED, allowed
    return (ToolMode.AUTO, allowed) if allowed else (ToolMode.NONE, [])


def _allowed(asked: _Chosen, offered: Sequence[OfferedTool]) -> Iterator[OfferedTool]:
    if not asked.tools:
        raise RequestError("allowed_tools needs a mode and a list of tools", "tool_choice.tools")
    seen: set[ToolKey] = set()
    for i, one in enumerate(asked.tools):
        if one.type.startswith(SERVER_TOOLS):
            continue
        found = _named(one, offered, f"tool_choice.tools[{i}]")
        if found.key not in seen:
            seen.add(found.key)
            yield found


def _named(asked: _Chosen, offered: Sequence[OfferedTool], where: str) -> OfferedTool:
    if asked.type.startswith(SERVER_TOOLS):
        raise RequestError(f"this server does not run tools of the type {asked.type[:40]}", where)
    name = SEARCH if asked.type == SEARCH else asked.name
    kind = ToolKind.CUSTOM if asked.type == "custom" else ToolKind.FUNCTION
    for one in offered:
        if one.tool.kind != kind or asked.namespace not in (None, one.key.namespace):
            continue
        if name in (one.key.name, one.tool.name):
            return one
    raise RequestError(f"no tool of the request is the {asked.type[:40]} {str(name)[:128]!r}", where)
