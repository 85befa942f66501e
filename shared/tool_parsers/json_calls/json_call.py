"""Reads calls that are written as JSON objects, such as {"name": "get_weather", "arguments": {"city": "Paris"}}."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from blockyard.shared.output_parsing.json_text import collected, json_string, object_value
from blockyard.shared.output_parsing.markers import Markers
from blockyard.shared.output_parsing.parts import CALL_END, Part, PartKind, Reading
from blockyard.shared.output_parsing.text_input import TextInput
from blockyard.shared.tool_parsers.grammar_rules import MAX_CALLS, GrammarRules, any_of
from blockyard.shared.tool_parsers.tools import Tool

MAX_EARLY_ARGUMENTS = 1 << 14  # characters of arguments before the name, which wait for it and are read again in vain


@dataclass(frozen=True, slots=True)
class JsonCall:
    """The keys of a call's object. An object with other keys, besides `"type": "function"`, is no call."""

    arguments: tuple[str, ...] = ("arguments",)
    name: str = "name"
    call_id: str = "id"
    name_first: bool = False  # where any object of a text may be a call: arguments before the name are none

    def read(self, text: TextInput, ends: Markers | None = None, names: Markers | None = None) -> Reading[bool]:
        """Reads the object that follows. False, with nothing read, if it is no call of one of `names` (`quoted_names`).

        The name is yielded once it and the arguments' key were read, the arguments as they come. The keys may stand in
        any order; arguments before the name wait for it. `ends` end malformed arguments.
        """
        place = text.keep()
        yield from text.spaces()
        header = value = None
        if (yield from text.literal("{")):
            header = yield from self._header(text, names)
        if header is not None and header.arguments is None:
            value = yield from object_value(text, PartKind.ARGUMENTS, ends)
        if header is None or (header.arguments is None and value is None):
            text.rewind(place)
            return False
        text.release()
        yield Part(PartKind.CALL, header.name, header.call_id)
        if value is None:
            yield Part(PartKind.ARGUMENTS, header.arguments or "")
            yield CALL_END
            return True
        yield from value
        yield CALL_END
        yield from self._close(text)
        return True

    def _header(self, text: TextInput, names: Markers | None) -> Reading["_Header | None"]:
        """Reads up to the arguments, or up to the end of the object if they come before the name."""
        name, call_id, arguments = "", "", None
        for _ in range(4):
            key = yield from _key(text)
            if key in self.arguments and name:
                return _Header(name, call_id)
            if key == self.name and not name:
                name = (yield from (json_string(text) if names is None else _known(text, names))) or ""
                if not name:
                    return None
            elif key in self.arguments and arguments is None and not self.name_first:
                value = yield from object_value(text, PartKind.ARGUMENTS)
                arguments = None if value is None else (yield from collected(value, MAX_EARLY_ARGUMENTS))
                if arguments is None:
                    return None
            elif key == self.call_id and not call_id:
                call_id = (yield from json_string(text)) or ""
            elif key != "type" or (yield from json_string(text)) != "function":
                return None
            yield from text.spaces()
            if (yield from text.literal("}")):
                return _Header(name, call_id, arguments or "{}") if name else None
            if not (yield from text.literal(",")):
                return None
        return None

    def _close(self, text: TextInput) -> Reading[None]:
        """Reads the end of the object behind its arguments: an id comes too late there."""
        place = text.keep()
        yield from text.spaces()
        if (yield from text.literal(",")):
            known = (yield from _key(text)) == self.call_id and (yield from json_string(text)) is not None
            yield from text.spaces()
        else:
            known = True
        if known and (yield from text.literal("}")):
            text.release()
        else:
            text.rewind(place)


def quoted_names(tools: Sequence[Tool]) -> Markers:
    """The names of the tools as JSON: text that is none of them waits no longer than it may become one."""
    return Markers(*(f'"{tool.name}"' for tool in tools))


def read_calls(
    text: TextInput,
    call: JsonCall,
    ends: Markers | None = None,
    names: Markers | None = None,
    separators: Markers | None = None,
) -> Reading[bool]:
    """Reads a list of calls, or calls one after another, with one of `separators` between them where there is one.

    False, with nothing read, if no call follows. What is no call ends the list and stays unread.
    """
    place = text.keep()
    yield from text.spaces()
    in_list = yield from text.literal("[")
    if not (yield from call.read(text, ends, names)):
        text.rewind(place)
        return False
    text.release()
    while True:
        place = text.keep()
        yield from text.spaces()
        if separators is not None and not in_list:
            yield from text.one_of(separators)
        is_next = (yield from text.literal(",")) if in_list else True
        if not is_next or not (yield from call.read(text, ends, names)):
            text.rewind(place)
            break
        text.release()
    if in_list:
        yield from text.spaced_literal("]")
    return True


def read_no_calls(text: TextInput, ends: Markers | None = None) -> Reading[bool]:
    """Reads an empty list, or nothing before one of `ends`: what models write behind a marker that call no tool.

    False, with nothing read, if something else follows.
    """
    place = text.keep()
    yield from text.spaces()
    if (yield from text.literal("[")):
        yield from text.spaces()
        is_empty = yield from text.literal("]")
    else:
        is_empty = ends is not None and bool((yield from text.next_marker(ends)))
    if is_empty:
        text.release()
    else:
        text.rewind(place)
    return is_empty


def tagged_reader(starts: Markers, ends: Markers) -> Callable[[TextInput, Sequence[Tool]], Reading[None]]:
    """`ToolFormat.read` of a family whose calls, as `read_calls` reads them, are between one of `starts` and of `ends`.

    Whitespace behind the calls is syntax. A start without a call is content.
    """
    call = JsonCall()

    def read(text: TextInput, tools: Sequence[Tool]) -> Reading[None]:
        while start := (yield from text.until(PartKind.CONTENT, starts)):
            if not ((yield from read_calls(text, call, ends)) or (yield from read_no_calls(text, ends))):
                yield Part(PartKind.CONTENT, start)
                continue
            yield from text.spaces()
            yield from text.one_of(ends)
            yield from text.spaces()

    return read


def write_call(rules: GrammarRules, tools: Sequence[Tool], key: str = "arguments", before: str = "") -> str:
    """An expression for the object of one call, spelt as the templates of most families spell it."""
    heads = [rules.text(f'{before}{{"name": "{tool.name}", "{key}": ') for tool in tools]
    calls = [f"{head} {rules.arguments(tool)}" for head, tool in zip(heads, tools, strict=True)]
    return f'{any_of(calls)} "}}"'


def write_list(rules: GrammarRules, tools: Sequence[Tool], parallel: bool) -> str:
    """An expression for the list of one or more calls. Its first text is long enough for an opening `[{"name"`."""
    first = write_call(rules, tools, before="[")
    others = f" ({write_call(rules, tools, before=', ')}){{0,{MAX_CALLS - 1}}}" if parallel else ""
    return f'{first}{others} "]"'


class _Header(NamedTuple):
    name: str
    call_id: str
    arguments: str | None = None  # that stood before the name


def _known(text: TextInput, names: Markers) -> Reading[str]:
    return (yield from text.one_of(names))[1:-1]


def _key(text: TextInput) -> Reading[str | None]:
    yield from text.spaces()
    key = yield from json_string(text)
    yield from text.spaces()
    if key is None or not (yield from text.literal(":")):
        return None
    yield from text.spaces()
    return key
