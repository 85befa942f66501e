"""A Lark grammar without recursion as one regular expression.

Where a call's arguments are JSON, the text of a custom tool is a string in it, which a grammar of the text itself does
not match: its line breaks are `\\n` there. The `pattern` of a JSON schema is about the text that the string stands for.
"""

import string
from collections.abc import Callable
from functools import lru_cache

import msgspec

MAX_CHARS = 50_000  # of the expression: rules that are used in many places are written out in each
MAX_DEPTH = 50  # of rules and brackets in each other

# rules of Lark's own `common` in frequent use
_COMMON = {
    "CR": "\\r",
    "LF": "\\n",
    "NEWLINE": "(?:\\r?\\n)+",
    "WS": "[ \\t\\f\\r\\n]+",
    "WS_INLINE": "[ \\t]+",
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[a-fA-F0-9]",
    "INT": "[0-9]+",
    "SIGNED_INT": "[+\\-]?[0-9]+",
    "LETTER": "[a-zA-Z]",
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "WORD": "[a-zA-Z]+",
    "CNAME": "[a-zA-Z_][a-zA-Z0-9_]*",
}
_LETTERS, _DIGITS, _SIGNS = string.ascii_lowercase, string.digits, ":|()[]?*+~.,{}!%"
_WORD = string.ascii_letters + string.digits + "_"
_ESCAPES = frozenset(
    "nrtfvdswDSWxu0" + string.punctuation
)  # others are assertions, references, or not in all languages
_NAMES = {"\n": "\\n", "\r": "\\r", "\t": "\\t", "\f": "\\f"}


class _NoRegex(ValueError):
    """The grammar is wrong, recursive, or uses what regular expressions do not have."""


Token = tuple[str, str]  # kind and text


@lru_cache(maxsize=64)
def lark_regex(grammar: str) -> str | None:
    """What the whole of a text must match to be of this grammar; None where no expression says so."""
    try:
        return _Rules(_tokens(grammar)).expression("start", ())
    except _NoRegex:
        return None


def _tokens(grammar: str) -> list[Token]:
    """Raises _NoRegex."""
    found, at = [("newline", "\n")], 0
    while at < len(grammar):
        char, begin = grammar[at], at
        if char in " \t\r\f":
            at += 1
        elif grammar.startswith("//", at):
            end = grammar.find("\n", at)
            at = len(grammar) if end < 0 else end
        elif char in ('"', "/"):
            at = _closed(grammar, at)
            while at < len(grammar) and grammar[at] in ("i" if char == '"' else _LETTERS):
                at += 1
            found.append(("string" if char == '"' else "regex", grammar[begin:at]))
        elif char in _WORD:
            kind, more = ("number", _DIGITS) if char in _DIGITS else ("name", _WORD)
            while at < len(grammar) and grammar[at] in more:
                at += 1
            found.append((kind, grammar[begin:at]))
        elif grammar[at : at + 2] in ("->", ".."):
            found.append(("sign", grammar[at : at + 2]))
            at += 2
        elif char == "\n" or char in _SIGNS:
            found.append(("newline" if char == "\n" else "sign", char))
            at += 1
        else:
            raise _NoRegex
    return found


def _closed(grammar: str, at: int) -> int:
    """The place behind what begins with this quote or slash, and ends with the next one in its line."""
    sign, at = grammar[at], at + 1
    while at < len(grammar) and grammar[at] != "\n":
        if grammar[at] == sign:
            return at + 1
        at += 2 if grammar[at] == "\\" else 1
    raise _NoRegex


class _Rules:
    def __init__(self, tokens: list[Token]) -> None:
        """Raises _NoRegex."""
        self._bodies: dict[str, list[Token]] = {}
        self._imported: dict[str, str] = {}
        self._written: dict[str, str] = {}
        self._depth = 0
        lines: list[list[Token]] = []
        for token in tokens:
            if token[0] == "newline":
                lines.append([])
            else:
                lines[-1].append(token)
        body: list[Token] | None = None
        for line in filter(None, lines):
            if line[0] == ("sign", "%"):
                self._directive(line)
                body = None
                continue
            head = line[1:] if line[0][1] in ("?", "!") else line
            colon = head.index(("sign", ":")) if ("sign", ":") in head else -1
            if colon in (1, 3) and head[0][0] == "name":  # also with a priority, as in `name.2:`
                body = self._bodies.setdefault(head[0][1], [])
                if body:
                    raise _NoRegex
                line = head[colon + 1 :]  # noqa: PLW2901
            if body is None:
                raise _NoRegex
            body += line

    def expression(self, name: str, inside: tuple[str, ...]) -> str:
        """Raises _NoRegex."""
        if name in self._imported:
            return self._imported[name]
        if name in self._written:
            return self._written[name]
        if name in inside or name not in self._bodies:
            raise _NoRegex
        reader = _RuleBody(self, self._bodies[name], (*inside, name))
        found = self._written[name] = self.deeper(reader.whole)
        return found

    def deeper(self, read: Callable[[], str]) -> str:
        """What `read` returns, unless it is too long or too deep."""
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise _NoRegex
        found = read()
        self._depth -= 1
        if len(found) > MAX_CHARS:
            raise _NoRegex
        return found

    def _directive(self, line: list[Token]) -> None:
        texts = [text for _, text in line]
        if texts[1:4] != ["import", "common", "."] or len(texts) not in (5, 7) or texts[4] not in _COMMON:
            raise _NoRegex
        self._imported[texts[-1]] = _COMMON[texts[4]]


class _RuleBody:
    """Reads what stands behind a rule's colon."""

    def __init__(self, rules: _Rules, tokens: list[Token], inside: tuple[str, ...]) -> None:
        self._rules, self._tokens, self._inside, self._at = rules, tokens, inside, 0

    def whole(self) -> str:
        found = self._choice()
        if self._at < len(self._tokens):
            raise _NoRegex
        return found

    def _choice(self) -> str:
        branches = [self._sequence()]
        while self._takes("|"):
            branches.append(self._sequence())
        return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"

    def _sequence(self) -> str:
        pieces: list[str] = []
        while self._at < len(self._tokens) and self._tokens[self._at][1] not in ("|", ")", "]"):
            if self._takes("->"):
                self._next("name")
                continue
            pieces.append(self._repeated(self._item()))
            if sum(map(len, pieces)) > MAX_CHARS:
                raise _NoRegex
        return "".join(pieces)

    def _item(self) -> str:
        kind, text = self._tokens[self._at]
        self._at += 1
        match kind:
            case "string" if self._takes(".."):
                return f"[{_plain(_string(text))}-{_plain(_string(self._next('string')))}]"
            case "string":
                return f"(?i:{_plain(_string(text))})" if text.endswith("i") else f"(?:{_plain(_string(text))})"
            case "regex":
                return _regex(text)
            case "name":
                return f"(?:{self._rules.expression(text, self._inside)})"
        if text not in ("(", "["):
            raise _NoRegex
        inner = self._rules.deeper(self._choice)
        if not self._takes(")" if text == "(" else "]"):
            raise _NoRegex
        return f"(?:{inner})" if text == "(" else f"(?:{inner})?"

    def _repeated(self, item: str) -> str:
        for sign in ("?", "*", "+"):
            if self._takes(sign):
                return self._repeated(f"(?:{item}{sign})" if self._is_repeated() else item + sign)
        if self._takes("~"):
            least = self._next("number")
            return f"{item}{{{least},{self._next('number')}}}" if self._takes("..") else f"{item}{{{least}}}"
        if self._takes("{"):
            least, most = self._next("number"), ""
            if self._takes(","):
                most = "," + (self._next("number") if self._tokens[self._at][0] == "number" else "")
            if not self._takes("}"):
                raise _NoRegex
            return f"{item}{{{least}{most}}}"
        return item

    def _is_repeated(self) -> bool:
        return self._at < len(self._tokens) and self._tokens[self._at][1] in ("?", "*", "+")

    def _takes(self, sign: str) -> bool:
        if self._at < len(self._tokens) and self._tokens[self._at] == ("sign", sign):
            self._at += 1
            return True
        return False

    def _next(self, kind: str) -> str:
        if self._at == len(self._tokens) or self._tokens[self._at][0] != kind:
            raise _NoRegex
        self._at += 1
        return self._tokens[self._at - 1][1]


def _string(text: str) -> str:
    try:
        value: str = msgspec.json.decode(text.removesuffix("i"), type=str)
    except (msgspec.DecodeError, UnicodeEncodeError) as e:
        raise _NoRegex from e
    return value


def _regex(text: str) -> str:
    """The expression between slashes, if it is one and does not depend on the text around. Raises _NoRegex."""
    body, _, flags = text[1:].rpartition("/")
    if not set(flags) <= set("is"):
        raise _NoRegex
    at, depth, in_class = 0, 0, False
    while at < len(body):
        char, rest = body[at], body[at + 1 : at + 3]
        if char == "\\" and rest[:1] not in _ESCAPES:
            raise _NoRegex
        if in_class:
            in_class = char != "]"
        elif char == "[":
            in_class = True
            at += len(rest[:2]) if rest in ("^]", "^[") else int(rest[:1] in ("]", "^"))
        elif char in "^$" or (char == "(" and rest[:1] == "?" and rest != "?:"):
            raise _NoRegex
        else:
            depth += {"(": 1, ")": -1}.get(char, 0)
            if depth < 0:
                raise _NoRegex
        at += 2 if char == "\\" else 1
    if depth or in_class or at > len(body):
        raise _NoRegex
    return f"(?{flags}:{body.replace(chr(92) + '/', '/')})"


def _plain(text: str) -> str:
    """An expression of exactly this text."""
    return "".join(
        _NAMES.get(char) or (char if char.isalnum() or char in " _" or ord(char) > 126 else f"\\{char}")
        for char in text
    )
