"""Formats of tool calls and reasoning by name, also ones that a user's Python file defines.

The file of --tool-parser-plugin has a `ToolFormat` in a variable, or several, and that of --reasoning-parser-plugin a
`ReasoningFormat`; one file may have both. Their names become values of --tool-call-parser and --reasoning-parser, and
are looked up before the known ones: shared/tool_parsers/FAMILIES.md shows a file. It is run in the launcher, and in
each process that reads requests or answers.
"""

import importlib.util
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from blockyard.shared.errors import ConfigError
from blockyard.shared.reasoning_parsers import registry as reasoning
from blockyard.shared.reasoning_parsers.interface import ReasoningFormat
from blockyard.shared.tool_parsers import registry as tools
from blockyard.shared.tool_parsers.interface import ToolFormat

TOOL_FLAG, REASONING_FLAG = "--tool-parser-plugin", "--reasoning-parser-plugin"
F = TypeVar("F", bound=ToolFormat | ReasoningFormat)


def tool_format(name: str, plugin: str = "") -> ToolFormat:
    """A value of --tool-call-parser. `plugin` is the path of a file, or empty. Raises ConfigError."""
    return find_tool_format(name, tool_formats(plugin))


def find_tool_format(name: str, own: Sequence[ToolFormat]) -> ToolFormat:
    """A value of --tool-call-parser, first among the formats of a file. Raises ConfigError."""
    found = _named(name, own)
    if found is None and own and name not in tools.BY_NAME and name not in tools.NOT_BUILT:
        raise ConfigError(f"--tool-call-parser {name}: known are {_names(own, tools.BY_NAME)}")
    return found or tools.tool_format(name)


def reasoning_format(name: str, plugin: str = "") -> ReasoningFormat:
    """A value of --reasoning-parser. `plugin` is the path of a file, or empty. Raises ConfigError."""
    return find_reasoning_format(name, reasoning_formats(plugin))


def find_reasoning_format(name: str, own: Sequence[ReasoningFormat]) -> ReasoningFormat:
    """A value of --reasoning-parser, first among the formats of a file. Raises ConfigError."""
    found = _named(name, own)
    if found is None and own and not reasoning.is_known(name):
        raise ConfigError(f"--reasoning-parser {name}: known are {_names(own, reasoning.BY_NAME)}")
    return found or reasoning.reasoning_format(name)


def tool_formats(plugin: str) -> list[ToolFormat]:
    """The formats of a file; none without one. Raises ConfigError."""
    return _formats(plugin, TOOL_FLAG, ToolFormat, lambda one: callable(one.read) and callable(one.write_grammar))


def reasoning_formats(plugin: str) -> list[ReasoningFormat]:
    """The formats of a file; none without one. Raises ConfigError."""
    return _formats(plugin, REASONING_FLAG, ReasoningFormat, lambda one: callable(one.read) and bool(one.end))


def format_of_template(template: str, formats: Iterable[F]) -> F | None:
    """Returns the first format with all its marks in this chat template."""
    for one in formats:
        if one.template_marks and all(mark in template for mark in one.template_marks):
            return one
    return None


def _formats(plugin: str, flag: str, kind: type[F], is_whole: Callable[[F], bool]) -> list[F]:
    if not plugin:
        return []
    found = {id(value): value for value in vars(_loaded(plugin, flag)).values() if isinstance(value, kind)}
    if not found:
        raise ConfigError(f"{flag} {plugin}: has no variable that is a {kind.__name__}")
    names: set[str] = set()
    for one in found.values():
        if not one.name or one.name == "auto" or not is_whole(one):
            raise ConfigError(
                f"{flag} {plugin}: the {kind.__name__} {one.name!r} is not whole, or has no name of its own"
            )
        for name in (one.name, *one.aliases):
            if name in names:
                raise ConfigError(f"{flag} {plugin}: two formats have the name {name!r}")
            names.add(name)
    return list(found.values())


def _loaded(plugin: str, flag: str) -> ModuleType:
    """Runs the file."""
    path = Path(plugin)
    if not path.is_file():
        raise ConfigError(f"{flag} {plugin}: no such file")
    name = f"blockyard_plugin_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{flag} {plugin}: not a Python file, whose name ends with .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # as for imported modules: dataclasses look their module up there
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as e:  # a user's file may raise anything
        reason = " ".join(str(e).split())
        raise ConfigError(f"{flag} {plugin}: does not import: {type(e).__name__}: {reason}") from e
    return module


def _named(name: str, formats: Sequence[F]) -> F | None:
    return next((one for one in formats if name in (one.name, *one.aliases)), None)


def _names(own: Sequence[F], known: dict[str, F]) -> str:
    return ", ".join(sorted({*known, *(name for one in own for name in (one.name, *one.aliases))}))
