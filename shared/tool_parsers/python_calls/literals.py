"""Reads Python calls, such as get_weather(city='Paris', days=[1, 2]), and writes their arguments as JSON.

Values are the literals of Python: strings, numbers, True, False, None, lists, tuples and dicts, also as JSON spells
them. Chat templates put texts between quotes without escapes, and models do as they do: a quote ends a string if what
may follow a string follows it, or an expression goes on with it: the string then has the text of the expression.
"""

from collections.abc import Collection, Sequence

from blockyard.shared.output_parsing.json_text import escaped
from blockyard.shared.output_parsing.markers import Markers
from blockyard.shared.output_parsing.parts import CALL_END, Part, PartKind, Reading
from blockyard.shared.output_parsing.text_input import TextInput
from blockyard.shared.tool_parsers.interface import ALPHANUMERIC
from blockyard.shared.tool_parsers.nested_values import Notation, ValueReader, json_number
from blockyard.shared.tool_parsers.tools import Tool

MAX_NAME_CHARS = 128
_NAME_CHARS = frozenset(ALPHANUMERIC + "_-.")
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_QUOTES = Markers("'", '"', "'''", '"""')
_IN_STRING = {quote: Markers(quote, "\\") for quote in ("'", '"', "'''", '"""')}
_PREFIXES = frozenset("rRuUbBfF")
_BEHIND_NAME = Markers("(")
_BEHIND_KEY = Markers("=", ",", ")", "(", "[", "{", "'", '"', ":")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"', "\n": ""}
_ESCAPES |= {"a": "\a", "b": "\b", "f": "\f", "v": "\v"}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_OCTAL = frozenset("01234567")
_OPERATORS = "%+*.[i"  # the first characters of what goes on behind a string: see `_is_operation`
_VALUE_STARTS = "'\"[{-0123456789"  # of arguments without a name


def read_calls(
    text: TextInput, tools: Sequence[Tool], closer: str, names: Markers | None = None, place: int | None = None
) -> Reading[bool]:
    """Reads NAME(arguments), or several with commas or whitespace between them, and `closer`, which may be missing.

    False if none follows. `names` are the names that count, each with its bracket; without them each name does.
    `place` is one of `keep`: the text goes back to it if no call follows.
    """
    num_calls, is_whole = 0, True
    while is_whole:
        start = text.keep() if num_calls or place is None else place
        yield from text.spaces()
        if num_calls and (yield from text.literal(",")):
            yield from text.spaces()
        name = yield from _head(text, tools, names)
        if not name:
            text.rewind(start)
            break
        text.release()  # before the arguments: all of them would be kept
        num_calls += 1
        yield Part(PartKind.CALL, name)
        is_whole = yield from _arguments(text, _positions(name, tools))
        yield CALL_END
        if not is_whole:  # calls may follow all the same
            is_whole = yield from text.spaced_literal(")")
    if num_calls:
        yield from _close(text, closer)
    return num_calls > 0


def _close(text: TextInput, closer: str) -> Reading[None]:
    place = text.keep()
    yield from text.spaces()
    if (yield from text.literal(",")):
        yield from text.spaces()
    if (yield from text.literal(closer)):
        text.release()
    else:
        text.rewind(place)


def _head(text: TextInput, tools: Sequence[Tool], names: Markers | None) -> Reading[str]:
    """Reads a name and its bracket. Empty if something else follows, or what are no arguments behind them."""
    name = yield from _name(text, names)
    if not name:
        return ""
    start = text.keep()
    is_call = yield from _arguments_follow(text, _positions(name, tools))
    text.rewind(start)
    return name if is_call else ""


def _name(text: TextInput, names: Markers | None) -> Reading[str]:
    """Reads a name and its bracket. Empty if something else follows."""
    if names is not None:
        return (yield from text.one_of(names))[:-1]
    name = yield from text.before(_BEHIND_NAME, MAX_NAME_CHARS, _NAME_CHARS.issuperset)
    if not name:
        return ""
    text.skip(1)
    return name


def _positions(name: str, tools: Sequence[Tool]) -> list[str]:
    """The names of arguments without a name, in order."""
    properties = next((tool.parameters.get("properties") for tool in tools if tool.name == name), None)
    return list(properties) if isinstance(properties, dict) else []


def _arguments_follow(text: TextInput, positions: Collection[str]) -> Reading[bool]:
    yield from text.spaces()
    first = yield from text.peek()
    if not first:
        return False
    if first == ")" or first in _VALUE_STARTS:
        return True
    if (yield from text.literal("**")):
        yield from text.spaces()
        return (yield from text.peek()) == "{"
    return bool((yield from _key(text)))


def _key(text: TextInput) -> Reading[str | None]:
    """Reads `key=`. None, with nothing read, if something else follows; empty if the text ends before the sign."""
    place = text.keep()
    key = ((yield from text.before(_BEHIND_KEY, MAX_NAME_CHARS, _may_be_key)) or "").strip()
    if key and not key.startswith("*") and (yield from text.literal("=")):
        text.release()
        return key
    return "" if text.rewind(place) else None


def _may_be_key(text: str) -> bool:
    return len(text.split()) < 2


def _arguments(text: TextInput, positions: Sequence[str]) -> Reading[bool]:
    """Writes the arguments as a JSON object, and reads the bracket behind them. False if they are malformed."""
    yield from text.spaces()
    if (yield from text.literal("**")):
        is_whole = yield from VALUES.read(text, ",)")
        yield from text.spaces()
        return is_whole and (yield from text.literal(")"))
    yield _json("{")
    num_read = 0
    while not (yield from text.literal(")")):
        key = yield from _key(text)
        if key == "":
            return False
        if key is None:
            key = positions[num_read] if num_read < len(positions) else str(num_read)
        yield _json(f'{", " if num_read else ""}"{escaped(key)}": ')
        if not (yield from VALUES.read(text, ",)")):
            return False
        num_read += 1
        yield from text.spaces()
        if (yield from text.literal(",")):
            yield from text.spaces()
        elif (yield from text.peek()) != ")":
            return False
    yield _json("}")
    return True


def read_string(text: TextInput, behind: str) -> Reading[bool | None]:
    """Writes the string that follows: see `Notation`."""
    prefix = ""
    if (yield from text.peek()) in _PREFIXES:
        start = yield from text.peek(2)
        if start[1:] not in ("'", '"'):
            return None
        prefix = start[:1]
        text.skip(1)
    quote = yield from text.one_of(_QUOTES)
    if not quote:
        return None
    yield _json('"')
    while True:
        found = yield from text.until(PartKind.ARGUMENTS, _IN_STRING[quote], escaped)
        if not found:
            return False
        if found == "\\":
            yield from _escape(text, quote, prefix in ("r", "R"))
        elif (yield from _ends(text, behind)):
            yield _json('"')
            return True
        elif operation := (yield from _operation(text, quote, behind)):
            yield _json(escaped(quote + operation) + '"')
            return True
        else:
            yield _json(escaped(found))


def _operation(text: TextInput, quote: str, behind: str) -> Reading[str]:
    """Reads what an expression that begins with a string does with it. Empty, with nothing read, if that goes on."""
    place = text.keep()
    yield from text.spaces()
    first = yield from text.peek()
    text.rewind(place)
    if not first or first not in _OPERATORS:
        return ""
    place = text.keep()
    raw = ((yield from VALUES.expression(text, ":" if ":" in behind else "")) or "").rstrip()
    following = yield from text.peek()
    if raw and raw[-1] != quote[0] and _is_operation(raw.lstrip()) and following and following in behind:
        text.release()
        return raw
    text.rewind(place)
    return ""


def _is_operation(raw: str) -> bool:
    """Whether text behind a string is like that in '%s' % x, 'a' + b, 'a' * 2, 'a'.join(b), 'a'[0] or 'a' if b else c.

    A text in quotes may go on with such a character too: a value has to follow it.
    """
    first, rest = raw[0], raw[1:].lstrip()
    if first in "%+*":
        return bool(rest) and (rest[0].isalnum() or rest[0] in "_'\"([{")
    if first == ".":
        return raw[1:].partition("(")[0].isidentifier() and "(" in raw
    return first == "[" or (raw.startswith("if ") and " else " in raw)


def _ends(text: TextInput, behind: str) -> Reading[bool]:
    """Whether a string may end here."""
    place = text.keep()
    yield from text.spaces()
    following = yield from text.peek()
    text.rewind(place)
    return not following or following in behind


def _escape(text: TextInput, quote: str, is_raw: bool) -> Reading[None]:
    """Writes what a backslash and the characters behind it stand for; text as it is, if that is no escape."""
    code = yield from text.peek()
    if is_raw:
        text.skip(len(code))
        yield _json(escaped("\\" + code))
    elif code in _HEX_DIGITS:
        digits = (yield from text.peek(1 + _HEX_DIGITS[code]))[1:]
        value = _character(digits, _HEX_DIGITS[code])
        text.skip(1 + len(digits) if value else 0)
        yield _json(value or escaped("\\"))
    elif code and code in _OCTAL:
        digits = yield from text.peek(3)
        count = next((i for i, digit in enumerate(digits) if digit not in _OCTAL), len(digits))
        text.skip(count)
        yield _json(escaped(chr(int(digits[:count], 8))))
    elif code in _ESCAPES:
        text.skip(1)
        yield _json(escaped(_ESCAPES[code]))
    elif code == "/" and quote[0] == '"':  # of JSON
        pass
    else:
        yield _json(escaped("\\"))


def _character(digits: str, count: int) -> str:
    """The character of a hexadecimal escape inside of a JSON string; empty if it is none."""
    try:
        value = int(digits, 16) if len(digits) == count and digits.isalnum() else -1
    except ValueError:
        return ""
    if 0xD800 <= value < 0xE000:
        return f"\\u{value:04x}"  # half of a character: JSON spells it so, too
    return escaped(chr(value)) if 0 <= value < 0x110000 else ""


def json_of_word(word: str) -> str | None:
    """The JSON of a number, or of one of Python's words."""
    if word in _WORDS:
        return _WORDS[word]
    number = json_number(word)
    if number is not None or word[0] not in "+-.0123456789":
        return number
    digits = word.replace("_", "")
    try:
        return str(int(digits, 0))
    except ValueError:
        pass
    try:
        return json_number(repr(float(digits)))
    except ValueError:
        return None


def _json(piece: str) -> Part:
    return Part(PartKind.ARGUMENTS, piece)


NOTATION = Notation({"{": "}", "[": "]", "(": ")"}, read_string, json_of_word)
VALUES = ValueReader(NOTATION, ")")
