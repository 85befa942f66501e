"""Regular expressions of JSON schemas (ECMA-262), read piece by piece: engines differ in what they make of some pieces.

Imports nothing.
"""

import re
from collections.abc import Iterator
from itertools import pairwise

_PIECE = re.compile(
    r"\\(?:u\{[0-9A-Fa-f]{1,6}\}|u[0-9A-Fa-f]{4}|x[0-9A-Fa-f]{2}|c[A-Za-z]|.)|\(\?(?:<?[=!]|[A-Za-z]|-)?|.",
    re.DOTALL,
)
# white space of ECMA-262 beyond ASCII; some engines count less of it
_SPACES = "\u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
_CONTROL = re.compile(r"[\x00-\x1f]|\\(?:[nrtfv0]|c.|x[01].|u00[01].|u\{0*1?.\})")
_QUOTED = re.compile(r'"|\\(?:["\\]|x(?:22|5[cC])|u00(?:22|5[cC])|u\{0*(?:22|5[cC])\})')
_PAIR = re.compile(
    r"(?P<before>(?<!\\)(?:\\\\)*)\\u(?P<high>[dD][89abAB][0-9A-Fa-f]{2})\\u(?P<low>[dD][c-fC-F][0-9A-Fa-f]{2})"
)
_HALF = re.compile(r"\\u[dD][89a-fA-F]")
_NO_ESCAPE = re.compile(r"\\(?:[1-9bBAZzGQEkpPecCRXKNLlhH0]|$)")
_SETS = {r"\d": "0-9", r"\w": "A-Za-z0-9_", r"\s": rf"\s{_SPACES}"}
OUTSIDE, CLASS, NEGATED = "outside", "class", "negated class"


def pieces(pattern: str) -> Iterator[tuple[str, str]]:
    """Each character or escape of a pattern, and where it stands; the brackets of a class stand outside."""
    place, at = OUTSIDE, 0
    while at < len(pattern):
        found = _PIECE.match(pattern, at)
        piece = found[0] if found is not None and place == OUTSIDE else _in_class(pattern, at)
        if place == OUTSIDE and piece == "[":
            if pattern[at + 1 : at + 2] == "^":
                piece = "[^"
            yield piece, OUTSIDE
            place = NEGATED if piece == "[^" else CLASS
        else:
            if place != OUTSIDE and piece == "]":
                place = OUTSIDE
            yield piece, place
        at += len(piece)


def _in_class(pattern: str, at: int) -> str:
    found = _PIECE.match(pattern, at) if pattern[at] == "\\" else None
    return found[0] if found is not None else pattern[at]


def plain_pattern(pattern: str, within_json: bool = False) -> str:
    """The pattern with sets of characters spelled out, and signs escaped to which Rust's classes give a meaning.

    within_json: its text is the text of a JSON string, in which white space is no control character.
    """
    out = ""
    for piece, place in pieces(pattern):
        kind = piece.lower()
        if place != OUTSIDE and piece in ("[", "&", "~"):
            out += f"\\{piece}"
        elif kind not in _SETS or (place != OUTSIDE and piece != kind):
            out += piece
        else:
            is_blank = within_json and piece == r"\s" and place != NEGATED
            chars = f" {_SPACES}" if is_blank else _SETS[kind]
            out += chars if place != OUTSIDE else f"[{chars}]" if piece == kind else f"[^{chars}]"
    return out


def without_a_control(pattern: str) -> str:
    """The pattern with classes that lack U+0001, if they are negated or have a range from the first controls.

    Within JSON llguidance takes a class with all control characters for one with all short escapes: also those of a
    quote and of a backslash that the class excludes.
    """
    out, opening = "", ""
    members: list[str] = []
    for piece, place in pieces(pattern):
        if place != OUTSIDE:
            members.append(piece)
        elif opening:
            out += _lacking_a_control(opening, members) + piece
            opening, members = "", []
        elif piece in ("[", "[^"):
            opening = piece
        else:
            out += piece
    return out + opening + "".join(members)


def _lacking_a_control(opening: str, members: list[str]) -> str:
    """A class without its last bracket. A hyphen at an end becomes no range with what is put beside it."""
    plain = [rf"\{one}" if one == "-" and at in (0, len(members) - 1) else one for at, one in enumerate(members)]
    if opening == "[^":
        return "".join([opening, r"\x01", *plain])
    if any(after == "-" and _CONTROL.match(one) and _code(one) <= 1 for one, after in pairwise(plain)):
        return "".join([opening, *plain, r"&&[^\x01]"])
    return "".join([opening, *members])


def with_whole_characters(pattern: str) -> str:
    """The pattern with the character itself for two escapes of UTF-16, which no engine reads as one."""

    def character(found: re.Match[str]) -> str:
        halves = bytes.fromhex(found["high"] + found["low"])
        return found["before"] + halves.decode("utf-16-be")

    return _PAIR.sub(character, pattern)


def in_ascii(pattern: str) -> str:
    """The pattern with escapes for characters beyond ASCII."""
    return "".join(c if c.isascii() else f"\\u{{{ord(c):x}}}" for c in pattern)


def whole_pattern(pattern: str) -> str:
    """The pattern without the anchors at its ends, for an engine whose patterns match a whole text."""
    *others, (last, place) = [("", OUTSIDE), *pieces(pattern.removeprefix("^"))]
    return "".join(piece for piece, _ in others) + last * (last != "$" or place != OUTSIDE)


def misread(pattern: str) -> str | None:
    """Names the syntax of a pattern that an engine of simple regular expressions would ignore or misread."""
    at = 0
    for piece, place in pieces(pattern):
        at += len(piece)
        if place == OUTSIDE and ((piece == "^" and at > 1) or (piece == "$" and at < len(pattern))):
            return "anchors in the middle"
        if place == OUTSIDE and piece.startswith("(?") and piece != "(?":
            return "look-around" if piece[-1] in "=!" else "flags and names of groups"
        if _HALF.match(piece):
            return "halves of characters"
        if _NO_ESCAPE.match(piece):
            return f"the escape {piece}"
    return None


def writes_controls(pattern: str) -> bool:
    """Whether it names control characters, which a string of JSON may not hold as they are."""
    return any(place != NEGATED and _CONTROL.match(piece) for piece, place in pieces(pattern))


def needs_escapes(pattern: str) -> bool:
    """Whether it names control characters that JSON writes as `\\u0001`, for which it has no shorter escape."""
    controls = [piece for piece, place in pieces(pattern) if place != NEGATED and _CONTROL.match(piece)]
    return any(piece[-1] not in "nrtf\n\r\t\f\b" or len(piece) > 2 for piece in controls)


def writes_quotes(pattern: str) -> bool:
    """Whether it names quotes or backslashes, which a string of JSON holds escaped."""
    return any(place != NEGATED and _QUOTED.fullmatch(piece) for piece, place in pieces(pattern))


def spans_quotes(pattern: str) -> bool:
    """Whether a range of characters in a class goes from before a quote or backslash to behind it."""
    before: list[str] = []
    for piece, place in pieces(pattern):
        before = [*before[-2:], piece] if place == CLASS else []
        if len(before) == 3 and before[1] == "-":
            least, most = _code(before[0]), _code(before[2])
            if any(least <= ord(sign) <= most for sign in '"\\'):
                return True
    return False


def _code(piece: str) -> int:
    """The number of the character that a piece of a class stands for."""
    number = re.fullmatch(r"\\[ux]\{?([0-9A-Fa-f]+)\}?", piece)
    return int(number[1], 16) if number else ord(piece[-1])


def without_options(pattern: str) -> str:
    """The pattern with `(x|)` for `(x)?`."""
    out, options = "", 0
    for piece, place in pieces(pattern):
        if options and piece == "?" and place == OUTSIDE:
            options -= 1  # the first one makes the group an option, a second one makes it lazy
            out = out if options == 0 else f"{out[:-1]}|)"
            continue
        options = 2 if piece == ")" and place == OUTSIDE else 0
        out += piece
    return out
