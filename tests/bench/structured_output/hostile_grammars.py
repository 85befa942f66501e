"""Grammars that no server should take: malformed ones, and ones that keep a check busy for a second."""

from blockyard.shared.messages import Grammar, GrammarKind

SLOW_EVERY = 40  # one in so many is slow to check


def hostile(count: int, name: str = "") -> list[Grammar]:
    """`count` different grammars, none of which can be had. Two calls with different names share none."""
    return [_slow(f"{name}{i}") if i % SLOW_EVERY == 0 else _malformed(f"{name}{i}") for i in range(count)]


def _malformed(name: str) -> Grammar:
    return Grammar(GrammarKind.REGEX, f"(a{name}")


def _slow(name: str) -> Grammar:
    """Takes an engine a second, which then finds it too large."""
    return Grammar(GrammarKind.EBNF, f'root ::= "{name}" (' + "|".join("a" * 100_000) + ')\na ::= "x"')
