"""How gateways read tool calls and reasoning: --tool-call-parser, --reasoning-parser and the flags beside them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from blockyard.shared import parser_plugins
from blockyard.shared.chat_template_files import chat_templates
from blockyard.shared.config.checkpoint import Checkpoint, chat_template
from blockyard.shared.config.parsed_flags import Values
from blockyard.shared.config.services.gateway import ParserPlugins
from blockyard.shared.config.structured_outputs import FLAG as GRAMMAR_FLAG
from blockyard.shared.config.structured_outputs import StructuredOutputsKeys, read_keys
from blockyard.shared.errors import ConfigError
from blockyard.shared.messages import ToolDefaults
from blockyard.shared.reasoning_parsers import registry as reasoning_parsers
from blockyard.shared.reasoning_parsers.interface import ReasoningFormat, opens_by_itself
from blockyard.shared.tool_parsers import registry as tool_parsers
from blockyard.shared.tool_parsers.interface import ToolFormat

AUTO = "auto"
REASONING_CONFIG = "reasoning-config"
F = TypeVar("F", bound=ToolFormat | ReasoningFormat)


@dataclass(frozen=True, slots=True)
class _Kind(Generic[F]):
    """One of the two kinds of formats."""

    flag: str
    plugin_flag: str
    switch: str  # needs the flag
    what: str
    named: Callable[[str, str], F]  # by name and plugin
    of_plugin: Callable[[str], list[F]]
    formats: Sequence[F]


_TOOLS = _Kind(
    "tool-call-parser",
    "tool-parser-plugin",
    "enable-auto-tool-choice",
    "tool calls stay",
    parser_plugins.tool_format,
    parser_plugins.tool_formats,
    tool_parsers.FORMATS,
)
_REASONING = _Kind(
    "reasoning-parser",
    "reasoning-parser-plugin",
    "enable-reasoning",
    "reasoning stays",
    parser_plugins.reasoning_format,
    parser_plugins.reasoning_formats,
    reasoning_parsers.FORMATS,
)


class ReasoningKeys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The keys of --reasoning-config."""

    reasoning_start_str: str = ""  # empty: as the format of --reasoning-parser says
    reasoning_end_str: str = ""
    reasoning_parser: str = ""  # as --reasoning-parser


class OutputParsers(msgspec.Struct, frozen=True):
    """The settings, and a line for each choice of `auto` and each flag without effect."""

    defaults: ToolDefaults
    notes: list[str]


def autos(values: Values) -> list[str]:
    """Returns the flags for which the chat template decides on a format."""
    names = {_TOOLS.flag: _name(values, _TOOLS), _REASONING.flag: _name(values, _REASONING)}
    return [f"--{flag} auto" for flag, name in names.items() if name == AUTO]


def output_parsers(values: Values, model: Checkpoint) -> OutputParsers:
    """Settles `auto`. Raises ConfigError for an unknown name, a plugin that does not import, or a missing flag."""
    notes: list[str] = []
    templates = _templates(values, model) if autos(values) else []
    tools = _chosen(values, _TOOLS, templates, notes)
    reasoning = _chosen(values, _REASONING, templates, notes)
    marks = _reasoning_config(values)
    if marks.reasoning_start_str and not marks.reasoning_end_str:
        raise ConfigError(f"{values.where(REASONING_CONFIG)}: reasoning_start_str needs reasoning_end_str")
    defaults = ToolDefaults(
        auto_choice=tools is not None and values.get("enable-auto-tool-choice", bool),
        parser=tools.name if tools else "",
        exclude_when_none=values.get("exclude-tools-when-tool-choice-none", bool),
        reasoning_parser=reasoning.name if reasoning else "",
        reasoning_end=marks.reasoning_end_str or (reasoning.end if reasoning else ""),
        reasoning_start=marks.reasoning_start_str or (_start_of(reasoning) if reasoning else ""),
        reasoning_other_ends=list(reasoning.other_ends) if reasoning else [],
    )
    return OutputParsers(defaults, notes)


def plugins(values: Values) -> ParserPlugins:
    return ParserPlugins(tools=_plugin(values, _TOOLS), reasoning=_plugin(values, _REASONING))


def _start_of(reasoning: ReasoningFormat) -> str:
    """The marker without which an answer does not reason; empty: answers begin inside of reasoning."""
    try:
        return "" if opens_by_itself(reasoning) else reasoning.start
    except Exception as e:
        raise ConfigError(f"--reasoning-parser {reasoning.name}: reading a text raised {e!r}") from e


def _chosen(values: Values, kind: _Kind[F], templates: Sequence[str], notes: list[str]) -> F | None:
    name, plugin = _name(values, kind), _plugin(values, kind)
    own = kind.of_plugin(plugin)
    if name is None:
        if values.get(kind.switch, bool):
            raise ConfigError(f"{values.where(kind.switch)}: needs --{kind.flag} NAME, or --{kind.flag} auto")
        if plugin:
            notes.append(f"--{kind.plugin_flag} {plugin}: has no effect without --{kind.flag}")
        return None
    if name != AUTO:
        return kind.named(name, plugin)
    for template in templates:
        if found := parser_plugins.format_of_template(template, (*own, *kind.formats)):
            notes.append(f"--{kind.flag} auto: {found.name}, by the chat template")
            return found
    why = "the chat template has the marks of none that is known" if templates else "the model has no chat template"
    notes.append(f"--{kind.flag} auto: {why}; {kind.what} in the text")
    return None


def _name(values: Values, kind: _Kind[F]) -> str | None:
    """The name that the flag has, or, for reasoning, a key of --structured-outputs-config or --reasoning-config."""
    given, keys = values.maybe(kind.flag, str), _keys(values, kind)
    if keys is None:
        return given
    for flag, name in (
        (GRAMMAR_FLAG, keys.reasoning_parser),
        (REASONING_CONFIG, _reasoning_config(values).reasoning_parser),
    ):
        if name and given not in (None, name):
            raise ConfigError(f"{values.where(flag)}: reasoning_parser {name} and --{kind.flag} {given} disagree")
        given = given or name or None
    return given


def _reasoning_config(values: Values) -> ReasoningKeys:
    try:
        return msgspec.convert(values.get(REASONING_CONFIG, dict), ReasoningKeys)
    except msgspec.ValidationError as e:
        raise ConfigError(f"{values.where(REASONING_CONFIG)}: {e}") from e


def _plugin(values: Values, kind: _Kind[F]) -> str:
    """The absolute path of the plugin, or an empty text."""
    keys = _keys(values, kind)
    given = values.get(kind.plugin_flag, str) or (keys.reasoning_parser_plugin if keys is not None else "")
    return str(Path(given).expanduser().absolute()) if given else ""


def _keys(values: Values, kind: _Kind[F]) -> StructuredOutputsKeys | None:
    return read_keys(values) if kind.flag == _REASONING.flag else None


def _templates(values: Values, model: Checkpoint) -> list[str]:
    """The templates that requests may use, first the ones that show tools."""
    given = chat_template(values)
    if given is not None:
        return [given]
    found = chat_templates(model.tokenizer_path)
    return [found[name] for name in ("tool_use", "default") if name in found]
