"""Reads quantization_config as a struct."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from blockyard.shared.errors import ConfigError

KEY, CONFIG = "quantization_config", "config.json"
REGEX = "re:"  # in front of a regular expression among names
ANY_KEY = "[...]"  # of an object whose keys are no fields, in the path of an error
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
        return _convert(given, struct)
    except msgspec.ValidationError as e:
        message, path = _parts(e)
        raise ValueError(_describe(given, message, path, _wrong_key(given, struct, path))) from e


def _convert(given: Any, struct: type[T]) -> T:
    return msgspec.convert(given, struct, strict=False, dec_hook=_convert_word)


def _convert_word(type_: type, value: Any) -> Word:
    if type_ is not Word or not isinstance(value, str):
        raise ValueError(f"Expected `str`, got `{_JSON_NAMES.get(type(value))}`")
    return Word(value.lower())


def _parts(error: msgspec.ValidationError) -> tuple[str, str]:
    """Returns message and path: "config_groups[...].weights", where `[...]` stands for a key."""
    message, _, path = str(error).partition(" - at `$")
    return message, path.rstrip("`").removeprefix(".")


def _wrong_key(given: Mapping[str, Any], struct: type[T], path: str) -> str | None:
    """Returns the key that the first `[...]` of a path stands for: what is wrong is so without the other keys, too."""
    head, dots, _ = path.partition(ANY_KEY)
    fields = head.split(".")
    found = next(_values(given, fields), None)
    for key in found if dots and isinstance(found, Mapping) else ():
        try:
            _convert(_with_one_key(given, fields, key), struct)
        except msgspec.ValidationError as e:
            if _parts(e)[1].startswith(head + ANY_KEY):
                return str(key)
    return None


def _with_one_key(given: Mapping[str, Any], fields: Sequence[str], key: str) -> dict[str, Any]:
    """A copy in which the object at a path of fields has one key."""
    if not fields:
        return {key: given[key]}
    return {**given, fields[0]: _with_one_key(given[fields[0]], fields[1:], key)}


def _describe(said: Mapping[str, Any], message: str, path: str, key: str | None) -> str:
    """Returns an error with the value of the field that it names; errors of structs say it themselves."""
    shown = path if key is None else path.replace(ANY_KEY, f"[{key!r}]", 1)
    got = re.search(r"got `(\w+)`$", message)
    if not path:
        return message
    if got is None:
        return f"{shown}: {message}"
    steps = [one.group(1) or one.group(2) for one in _STEP.finditer(path)]
    if key is not None:
        steps[steps.index("...")] = key
    for value in _values(said, steps):
        if _JSON_NAMES.get(type(value)) == got.group(1):
            return f"{shown} is {_show(value)}: {message}"
    return f"{shown}: {message}"


def _show(value: Any) -> str:
    return msgspec.json.encode(value).decode()[:_MOST_SHOWN]


def _values(value: Any, path: list[str]) -> Iterator[Any]:
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
