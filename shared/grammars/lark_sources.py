"""Lark as llguidance reads it: the JSON schemas in a source, and the engine's options, which requests may not set."""

import json
import re
from collections.abc import Callable

from blockyard.shared.grammars.interface import GrammarError

# comments, special tokens, strings, regular expressions and names hide no declaration; the lexer takes the longest
_PIECE = re.compile(
    r"""(?:\#|//)[^\n]*|<[^<>\s]+>|"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\])+/|%(?P<declared>json|llguidance)|.""",
    re.DOTALL | re.VERBOSE,
)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


_BLANKS = re.compile(r"[ \t\r\n]*")
_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def replace_lark_schemas(source: str, replace: Callable[[object], str]) -> str:
    """Replaces each schema of `%json` by the JSON that `replace` makes of it. Raises GrammarError."""
    out: list[str] = []
    at = 0
    while found := _PIECE.match(source, at):
        out.append(found[0])
        at = found.end()
        if found["declared"] is None:
            continue
        begin = at
        value, at = _read_json(source, begin, f"%{found['declared']}")
        if found["declared"] == "llguidance" and value != {}:
            raise GrammarError("%llguidance takes no options here: requests may not configure an engine")
        out.append("\n" * source.count("\n", begin, at))  # within the JSON, so that errors name the right lines
        out.append(" {}" if found["declared"] == "llguidance" else f" {replace(value)}")
    return "".join(out)


def _read_json(source: str, at: int, what: str) -> tuple[object, int]:
    blanks = _BLANKS.match(source, at)
    try:
        return _DECODER.raw_decode(source, blanks.end() if blanks else at)
    except (ValueError, RecursionError) as e:
        raise GrammarError(f"{what} of the Lark grammar is not followed by valid JSON: {e}") from e
