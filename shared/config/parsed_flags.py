"""Parses flags from the command line, the environment, YAML and keyword arguments; `Values` is their merged result.

A container platform sets variables with our prefix for services called `blockyard` (Kubernetes in every pod of a
namespace, Docker for `--link`). They are recognized and ignored.
"""

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import msgspec

from blockyard.shared.config.flag_values import coerce, is_switch_word
from blockyard.shared.config.flags import FLAGS, NAMES, SPELLINGS
from blockyard.shared.config.flags.flag import Flag, FlagKind, variable
from blockyard.shared.config.flags.roles import PER_ROLE, ROLE_NAMES
from blockyard.shared.errors import ConfigError

_NAME = re.compile(
    r"BLOCKYARD_(\w+_)?"
    r"(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?|ENV_\w+)"
)
_LINK = re.compile(r"(tcp|udp|sctp)://")
_SHOWN = 2  # names in the note


def _is_foreign(variable: str, text: str) -> bool:
    """True for a variable of the container platform. Names that are also flags (--port, --name) are told by value."""
    if _NAME.fullmatch(variable):
        return True
    if variable.endswith("_PORT"):
        return _LINK.match(text) is not None
    return variable.endswith("_NAME") and text.startswith("/") and text.count("/") == 2  # "/web/blockyard"


def _note(variables: list[str]) -> list[str]:
    """Returns one line for all of them, or none."""
    if not variables:
        return []
    shown = ", ".join(variables[:_SHOWN])
    more = f" and {len(variables) - _SHOWN} more" if len(variables) > _SHOWN else ""
    return [f"{shown}{more}: not read, the container platform set them for a service of that name"]


T = TypeVar("T")
PREFIX = "BLOCKYARD_"
LISTS = (FlagKind.LIST, FlagKind.INTS)
_NUMBER = re.compile(r"-\.?\d")


@dataclass(frozen=True, slots=True)
class ParsedFlag:
    value: object
    where: str  # its name in errors: "--port", "BLOCKYARD_PORT", "serve.yaml: port"
    is_partial: bool = False  # single keys of a JSON object, to be set in the object of another source


ParsedFlags = dict[str, ParsedFlag]


@dataclass(frozen=True, slots=True)
class JsonKey:
    """One key of a flag with a JSON object as value: `flag.key`, or `flag.key.inner`."""

    flag: Flag
    path: tuple[str, ...]

    def add_to(self, given: ParsedFlags, value: object, prefix: str) -> None:
        """Sets the key in the flag's object. `prefix` stands before the flag's name in errors."""
        name = self.flag.name
        before = given[name] if name in given else ParsedFlag({}, f"{prefix}{name}", is_partial=True)
        for key in reversed(self.path):
            value = {key: value}
        given[name] = replace(before, value=_merged(before.value, value))


def _merged(old: object, new: object) -> object:
    """Returns the JSON object `old` with the keys of `new` set, at any depth."""
    if not isinstance(old, dict) or not isinstance(new, dict):
        return new
    return old | {key: _merged(old.get(key), value) for key, value in new.items()}


def from_command_line(args: Sequence[str]) -> tuple[ParsedFlags, list[str]]:
    """Returns the flags and the positional arguments.

    Any number of leading dashes, `_` for `-`, `--flag=value` and `--flag value` are accepted; a switch takes no
    value, or `true` or `false`; a list takes all words up to the next flag and may be given again. One key of a JSON
    object is `--flag.key value`, which has precedence over the whole object.
    """
    given: ParsedFlags = {}
    keys: list[tuple[JsonKey, str]] = []
    positionals: list[str] = []
    rest = list(args)
    while rest:
        word = rest.pop(0)
        if not _is_flag(word):
            positionals.append(word)
            continue
        where, equals, of_key = word.partition("=")
        key = _json_key(where.lstrip("-"))
        if key is not None:
            keys.append((key, of_key if equals else str(_take_value(key.flag, rest, where))))
            continue
        flag, text, where = _split(word)
        typed = coerce(flag, _take_value(flag, rest, where) if text is None else text, where)
        if flag.kind in LISTS and flag.name in given and isinstance(typed, list):
            before = given[flag.name].value
            typed = [*before, *typed] if isinstance(before, list) else typed
        given[flag.name] = ParsedFlag(typed, where)
    for key, of_key in keys:
        key.add_to(given, _json_value(of_key), "--")
    return given, positionals


def from_environment(environ: Mapping[str, str]) -> tuple[ParsedFlags, list[str]]:
    """Returns flags of BLOCKYARD_* variables, and notes on ignored variables.

    Lists are JSON or separated by spaces, those of integers also by commas.
    """
    by_variable = {variable(name): flag for name, flag in NAMES.items()}
    given: ParsedFlags = {}
    foreign: list[str] = []
    for name, text in sorted(environ.items()):
        if not name.startswith(PREFIX):
            continue
        if _is_foreign(name, text):
            foreign.append(name)
            continue
        flag = by_variable.get(name)
        if flag is None:
            raise ConfigError(_unknown(name, name, list(by_variable)))
        if flag.name in given:
            raise ConfigError(f"{name}: given twice, {given[flag.name].where} is the same flag")
        words: object = text.split() if flag.kind is FlagKind.LIST and not text.startswith("[") else text
        given[flag.name] = ParsedFlag(coerce(flag, words, name), name)
    return given, _note(foreign)


def from_mapping(mapping: Mapping[object, object], source: str) -> ParsedFlags:
    """Returns flags of a YAML mapping or of keyword arguments; `source` begins each error."""
    given: ParsedFlags = {}
    keys: list[tuple[JsonKey, object]] = []
    for name, value in mapping.items():
        where = f"{source}: {name}"
        key = _json_key(str(name))
        if key is not None:
            keys.append((key, value))
            continue
        flag = NAMES.get(str(name).replace("_", "-"))
        if flag is None:
            raise ConfigError(_unknown(where, str(name), list(NAMES)))
        if flag.name in given:
            raise ConfigError(f"{where}: given twice")
        given[flag.name] = ParsedFlag(coerce(flag, value, where), where)
    for key, value in keys:
        key.add_to(given, value, f"{source}: ")
    return given


class Values:
    """Every flag's value: from the first source that has it, else its default."""

    def __init__(self, *sources: ParsedFlags) -> None:
        """`sources` in falling precedence. Raises ConfigError with a line for each refused value."""
        self._given: ParsedFlags = {}
        self._read: set[str] = set()
        for source in reversed(sources):
            for name, one in source.items():
                self._given[name] = _over(self._given.get(name), one)
        refusals = [
            f"{one.where}{_of(one.value)}: {reason}"
            for name, one in self._given.items()
            if (reason := FLAGS[name].refusal(one.value))
        ]
        if refusals:
            raise ConfigError("\n".join(refusals))

    def with_given(self, more: ParsedFlags) -> "Values":
        """Returns a copy in which `more` has precedence."""
        return Values(more, self._given)

    def of_role(self, role: str) -> "Values":
        """Returns a copy for workers of a role, "prefill" or "decode", in which `role.flag` is the value of `flag`."""
        own = {name: self._given[f"{role}.{name}"] for name in PER_ROLE if f"{role}.{name}" in self._given}
        return self.with_given(own)

    def __getitem__(self, name: str) -> object:
        self._read.add(name)
        return self._given[name].value if name in self._given else FLAGS[name].default

    def get(self, name: str, kind: type[T]) -> T:
        """Returns the value of a flag that has a default."""
        value = self[name]
        assert isinstance(value, kind), f"--{name} is {value!r}"
        return value

    def maybe(self, name: str, kind: type[T]) -> T | None:
        return None if self[name] is None else self.get(name, kind)

    def all(self) -> dict[str, object]:
        """Returns the value of every flag, without counting it as read."""
        return {name: self._given[name].value if name in self._given else flag.default for name, flag in FLAGS.items()}

    def is_given(self, name: str) -> bool:
        return name in self._given

    def unread(self) -> list[str]:
        """Returns the names of flags that were given and whose values nothing has asked for."""
        return [name for name in self._given if name not in self._read]

    def where(self, name: str) -> str:
        """Returns the flag's name in errors."""
        return self._given[name].where if name in self._given else f"--{name}"

    def notes(self) -> list[str]:
        """Returns one line for each mapped flag that was set."""
        return [
            f"{one.where}{_of(one.value)}: {FLAGS[name].mapped}"
            for name, one in sorted(self._given.items())
            if FLAGS[name].mapped and one.value != FLAGS[name].default
        ]


def _over(before: ParsedFlag | None, one: ParsedFlag) -> ParsedFlag:
    """Returns `one`, which has precedence; single keys of an object are set in the object that was there before."""
    if before is None or not one.is_partial:
        return one
    return replace(one, value=_merged(before.value, one.value), is_partial=before.is_partial)


def _of(value: object) -> str:
    return "" if isinstance(value, bool | dict | list) else f" {value}"


def _is_flag(word: str) -> bool:
    return word.startswith("-") and word not in ("-", "--") and not _NUMBER.match(word)


def _split(word: str) -> tuple[Flag, str | None, str]:
    """Splits a word of the command line into (flag, value in the same word or None, name in errors)."""
    where, equals, value = word.partition("=")
    name = where.lstrip("-")
    key = name.replace("_", "-")
    if key in SPELLINGS:
        return SPELLINGS[key], value if equals else None, where
    if key.startswith("no-") and key[3:] in SPELLINGS and SPELLINGS[key[3:]].kind is FlagKind.BOOL and not equals:
        return SPELLINGS[key[3:]], "false", where
    if re.fullmatch(r"O\d", name):  # -O3 is -O 3
        return SPELLINGS["O"], name[1:], where
    raise ConfigError(_unknown(where, key, list(SPELLINGS), "--"))


def _take_value(flag: Flag, rest: list[str], where: str) -> object:
    if flag.kind is FlagKind.BOOL:
        return rest.pop(0) if rest and is_switch_word(rest[0]) else True
    words: list[str] = []
    while rest and not _is_flag(rest[0]) and (not words or flag.kind in LISTS):
        words.append(rest.pop(0))
    if not words:
        if flag.const is not None:
            return flag.const
        raise ConfigError(f"{where}: expects a value")
    return words if len(words) > 1 else words[0]


def _json_key(name: str) -> JsonKey | None:
    """Returns the key that `name`, as "kv-transfer-config.kv_role", means; None if it is no key of a JSON object."""
    base, dot, path = name.partition(".")
    flag = SPELLINGS.get(base.replace("_", "-"))
    if not dot or flag is None or flag.kind is not FlagKind.JSON:
        return None
    return JsonKey(flag, tuple(path.replace("-", "_").split(".")))


def _json_value(text: str) -> object:
    """Reads JSON, or any other text as itself."""
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text


def _unknown(where: str, name: str, known: list[str], dashes: str = "") -> str:
    """Returns the error for a flag that does not exist."""
    role, _, shared = name.removeprefix(PREFIX).lower().replace("_", "-").replace(".", "-").partition("-")
    if role in ROLE_NAMES and shared in SPELLINGS:
        return f"{where}: is no setting of one role, give --{shared}; a role may have its own {', '.join(PER_ROLE)}"
    return f"{where}: no such flag{_suggestion(name, known, dashes)}"


def _suggestion(name: str, known: list[str], dashes: str = "") -> str:
    close = difflib.get_close_matches(name.replace("_", "-"), known, n=1) or difflib.get_close_matches(name, known, n=1)
    if not close:
        return ""
    found = close[0].replace("-", "_") if "_" in name and not dashes else close[0]
    return f"; did you mean {dashes}{found}?"
