"""Errors of grammar libraries without the source that they quote: clients are told the cause, in one line."""

import re

MAX_CHARS = 400
MAX_QUOTED = 40  # characters of the source in a row: a name of a rule, a property or a type
_REGEX = re.compile(r'(?:invalid regex ".*?" \(in regex\): )?regex parse error:\n.*?\nerror: ', re.DOTALL)
_LISTING = re.compile(r"\n +\d+ \| .*", re.DOTALL)  # numbered lines of the source
_PLACE = re.compile(r"^(?:at )?(\d+)\((\d+)\): ")
_EBNF_REST = re.compile(r" at line (\d+), '.*' \^ '.*'$", re.DOTALL)
_CHECK = re.compile(r"^Check failed: \(.*?\) is false: ")


def one_line(error: BaseException | str) -> str:
    """A library's error in one line of at most 400 characters."""
    text = " ".join(str(error)[:4000].split())
    return text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]}..."


def guidance_cause(error: str, has_lines: bool) -> str:
    """An error of llguidance or of its translator. has_lines: the lines that it counts are the client's."""
    text = _EBNF_REST.sub(r" at line \1", _LISTING.sub("", _REGEX.sub("invalid regex: ", error)))
    return one_line(_PLACE.sub(r"line \1, column \2: " if has_lines else "", text))


def xgrammar_cause(error: str) -> str:
    """Returns the last part of "[11:27:26] /project/cpp/x.cc:83: Regex ...". Later lines may quote the source."""
    text = error.partition(".cc:")[2].partition(": ")[2] or error
    return one_line(_CHECK.sub("", text.strip()).partition("\n")[0])


def without_source(message: str, source: str) -> str:
    """`message`, with "..." where it quotes more than a name from the source."""
    source = " ".join(source.split())
    kept, at = "", 0
    while at < len(message):
        end = at + MAX_QUOTED
        if end < len(message) and message[at : end + 1] in source:
            while end < len(message) and message[at : end + 1] in source:
                end += 1
            kept, at = f"{kept}...", end
        else:
            kept, at = kept + message[at], at + 1
    return kept
