"""The tools of a request to /v1/messages, and which of them the answer may or must call."""

from dataclasses import dataclass
from typing import Any

from blockyard.services.api_gateway.apis.messages.schemas import DefinedTool, ToolSelection
from blockyard.shared.errors import RequestError
from blockyard.shared.messages import ToolDefaults
from blockyard.shared.ring_client.request_fields.tool_schemas import check_parameters, with_json_types
from blockyard.shared.ring_client.request_fields.tools import (
    MAX_TOOLS,
    ToolMode,
    ToolUse,
    check_tool_name,
    encode_shown_tools,
)
from blockyard.shared.tool_parsers.tools import Tool, ToolKind

# types of tools that Anthropic's servers run: such a type ends in a date
RUN_BY_SERVERS = (
    "web_search_",
    "web_fetch_",
    "code_execution_",
    "tool_search_tool_",
    "advisor_",
    "mcp_toolset",
)
MODES = {"auto": ToolMode.AUTO, "any": ToolMode.REQUIRED, "tool": ToolMode.NAMED, "none": ToolMode.NONE}


@dataclass(frozen=True, slots=True)
class Offered:
    use: ToolUse | None  # None: no tools
    ignored: tuple[str, ...]  # tools that are left out


def read_offered_tools(
    tools: list[DefinedTool] | None, choice: ToolSelection | None, defaults: ToolDefaults, strict: bool
) -> Offered:
    """Tools that a server would run are left out, or with `strict` refused. Raises RequestError."""
    if tools is not None and len(tools) > MAX_TOOLS:
        raise RequestError(f"tools has at most {MAX_TOOLS} entries, got {len(tools)}", "tools")
    read: dict[str, tuple[Tool, dict[str, Any]]] = {}
    ignored = []
    for i, tool in enumerate(tools or []):
        where = f"tools[{i}]"
        if tool.type is not None and tool.type.startswith(RUN_BY_SERVERS):
            if strict or (choice is not None and choice.name is not None and choice.name == tool.name):
                raise RequestError(f"this server runs no tools: {tool.type[:80]!r} is not built", f"{where}.type")
            ignored.append(f"tools.{tool.type[:80]}")
            continue
        named, shown = _read(tool, where)
        if named.name in read:
            raise RequestError(f"two tools have the name {named.name!r}", f"{where}.name")
        read[named.name] = named, shown
    return Offered(_use(read, choice, defaults), tuple(ignored))


def _read(tool: DefinedTool, where: str) -> tuple[Tool, dict[str, Any]]:
    """A tool, and the form of it that chat templates show."""
    if tool.type not in (None, "custom"):
        said = f"tools of type {tool.type[:80]!r} are not built: give the tool a name and an input_schema instead"
        raise RequestError(said, f"{where}.type", code="unsupported_parameter")
    name = check_tool_name(tool.name, f"{where}.name")
    if tool.input_schema is None:
        raise RequestError("a tool needs its input_schema", f"{where}.input_schema")
    check_parameters(tool.input_schema, f"{where}.input_schema")
    shown: dict[str, Any] = {"name": name}
    if tool.description is not None:
        shown["description"] = tool.description
    shown["parameters"] = tool.input_schema
    made = Tool(ToolKind.FUNCTION, name, with_json_types(tool.input_schema), bool(tool.strict))
    return made, {"type": "function", "function": shown}


def _use(
    read: dict[str, tuple[Tool, dict[str, Any]]], choice: ToolSelection | None, defaults: ToolDefaults
) -> ToolUse | None:
    mode = ToolMode.AUTO if choice is None else MODES[choice.type]
    if not read:
        if mode in (ToolMode.REQUIRED, ToolMode.NAMED):
            raise RequestError("tool_choice needs tools", "tool_choice")
        return None
    allowed = [tool for tool, _ in read.values()]
    if choice is not None and mode == ToolMode.NAMED:
        if choice.name not in read:
            raise RequestError(f"no tool of the request has the name {str(choice.name)[:128]!r}", "tool_choice.name")
        allowed = [read[choice.name][0]]
    shown = [form for _, form in read.values()]
    hides = mode == ToolMode.NONE and defaults.exclude_when_none
    return ToolUse(
        mode,
        [] if mode == ToolMode.NONE else allowed,
        b"" if hides else encode_shown_tools(shown, "tools"),
        choice is None or not choice.disable_parallel_tool_use,
    )
