"""Reads quantization_config as a struct."""

import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import msgspec

from blockyard.shared.errors import ConfigError

KEY, CONFIG = "quantization_config", "config.json"
REGEX = "re:"  # in front of a regular expression among names
_STEP = re.compile(r"\.?([^.\[\]]+)|\[(\d+|\.\.\.)\]")  # of the path of an error: a field, or an element
_MOST_SHOWN = 80  # characters of a value
_JSON_NAMES = {str: "str", bool: "bool", int: "int", float: "float", list: "array", dict: "object", type(None): "null"}

T = TypeVar("T", bound=msgspec.Struct)


class Word(str):
    """A word of a file in lower case: the packages that write files read words so."""

    __slots__ = ()


def stated(said: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns quantization_config with the fields of the object in which ModelOpt has them."""
    inner = said.get("quantization")
    return {**said, **inner} if isinstance(inner, Mapping) else said


def read(said: Mapping[str, Any], struct: type[T], file: str = CONFIG) -> T:
    """Returns quantization_config as a struct, without the keys that it does not know.

    Null stands for the default. file: that has it. Raises ConfigError naming file, field and value.
    """
    try:
        return convert(stated(said), struct)
    except ValueError as e:
        raise ConfigError(f"{file}: {f'{KEY}: ' if file == CONFIG else ''}{e}") from e


def convert(said: Any, struct: type[T]) -> T:
    """The same for settings of some matrices. Raises ValueError naming field and value."""
    if not isinstance(said, Mapping):
        raise ValueError(f"{_show(said)} is no object")
    given = {key: value for key, value in said.items() if value is not None}
    try:
        return msgspec.convert(given, struct, strict=False, dec_hook=_convert_word)
    except msgspec.ValidationError as e:
        raise ValueError(_describe(given, e)) from e


def _convert_word(type_: type, value: Any) -> Word:
    if type_ is not Word or not isinstance(value, str):
        raise ValueError(f"Expected `str`, got `{_JSON_NAMES.get(type(value))}`")
    return Word(value.lower())


def _describe(said: Mapping[str, Any], error: msgspec.ValidationError) -> str:
    """Returns the error with the value of the field that it names; errors of structs say it themselves."""
    message, _, path = str(error).partition(" - at `$")
    path = path.rstrip("`").removeprefix(".")
    got = re.search(r"got `(\w+)`$", message)
    if not path:
        return message
    if got is None:
        return f"{path}: {message}"
    for value in _values(said, [one.group(1) or one.group(2) for one in _STEP.finditer(path)]):
        if _JSON_NAMES.get(type(value)) == got.group(1):
            return f"{path} is {_show(value)}: {message}"
    return f"{path}: {message}"


def _show(value: Any) -> str:
    return msgspec.json.encode(value).decode()[:_MOST_SHOWN]


def _values(value: Any, path: list[str]) -> Iterable[Any]:
    """Yields the values that a path may mean: the keys of objects that are no fields are `...` in it."""
    if not path:
        yield value
        return
    first, *rest = path
    if isinstance(value, Mapping):
        found = list(value.values()) if first == "..." else [value[first]] if first in value else []
    else:
        found = [value[int(first)]] if isinstance(value, list) and first.isdigit() and int(first) < len(value) else []
    for one in found:
        yield from _values(one, rest)


def check_rule(field: str, name: str, said: Any, struct: type[msgspec.Struct]) -> None:
    """Raises ValueError if settings of some matrices are wrong. field, name: where the file has them; "": of all."""
    try:
        convert(said, struct)
    except ValueError as e:
        raise ValueError(f"{field} {name!r}: {e}" if name else f"{field}: {e}") from e


def check_expression(field: str, text: str, shown: str) -> None:
    """Raises ValueError for a regular expression that is none. shown: as the file has it."""
    try:
        re.compile(text)
    except re.error as e:
        raise ValueError(f"{field} {shown!r} is not a regular expression: {e}") from e


def check_names(**lists: Iterable[str]) -> None:
    """Raises ValueError for a name that begins as a regular expression and is none. lists: by the names of fields."""
    for field, names in lists.items():
        for name in names:
            if name.startswith(REGEX):
                check_expression(field, name.removeprefix(REGEX), name)


def check_word(field: str, value: str, known: Iterable[str]) -> None:
    """Raises ValueError for a value that is none of these words."""
    known = tuple(known)
    if value not in known:
        raise ValueError(f"{field} {value!r} is none of {', '.join(known)}")


class NoSettings(msgspec.Struct, frozen=True):
    """Of a format whose tensors say all."""


class LeftOutNames(msgspec.Struct, frozen=True):
    """Of a format that reads nothing but the names of matrices that are not quantized."""

    modules_to_not_convert: list[str] = []

    def __post_init__(self) -> None:
        check_names(modules_to_not_convert=self.modules_to_not_convert)
