"""Converts flag values from text (command line, environment) and from types of YAML and Python."""

import math
import re
from fractions import Fraction

import msgspec

from blockyard.shared.config.flags.flag import Flag, FlagKind
from blockyard.shared.errors import ConfigError

_YES = ("true", "yes", "on", "1")
_NO = ("false", "no", "off", "0")
_NONE = ("none", "null", "")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([kmgtKMGT]?)")
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def coerce(flag: Flag, value: object, where: str) -> object:
    """Returns the value in the flag's kind, checked against its choices and range. Raises ConfigError naming `where`.

    None is the flag's default, and so is the text `None` if the flag may be unset.
    """
    if value is None or (flag.default is None and isinstance(value, str) and value.lower() in _NONE):
        return flag.default
    if isinstance(value, str | int) and str(value).lower() in flag.named_values:
        return flag.named_values[str(value).lower()]
    if isinstance(value, bool) and flag.const is not None:
        value = str(value).lower()
    try:
        typed = _READERS[flag.kind](_objects_as_text(value) if flag.takes_json else value)
    except (ValueError, msgspec.DecodeError) as e:
        article = "an" if flag.kind is FlagKind.INT else "a"
        if flag.named_values:
            raise ConfigError(
                f"{where}: expected {article} {flag.kind}, or {', '.join(flag.named_values)}, got {_shown(value)}"
            ) from e
        raise ConfigError(f"{where}: expected {article} {flag.kind}, got {_shown(value)}") from e
    if flag.any_case and isinstance(typed, str):
        typed = typed.lower()
    _check_choice(flag, typed, where)
    _check_range(flag, typed, where)
    return typed


def _objects_as_text(value: object) -> object:
    """Returns a value, or the items of a list, with JSON in place of mappings."""
    if isinstance(value, str) and value.startswith("["):
        value = msgspec.json.decode(value)
    if isinstance(value, list | tuple):
        return [_objects_as_text(item) for item in value]
    return msgspec.json.encode(value).decode() if isinstance(value, dict) else value


def is_switch_word(text: str) -> bool:
    return text.lower() in ("true", "false")


def _check_choice(flag: Flag, value: object, where: str) -> None:
    if flag.choices and str(value) not in flag.choices and str(value) not in flag.refused_values:
        raise ConfigError(f"{where}: {_shown(value)} is none of {', '.join(flag.choices)}")


def _check_range(flag: Flag, value: object, where: str) -> None:
    if isinstance(value, list) and flag.kind is FlagKind.INTS:
        for item in value:
            _check_range(flag, item, where)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return
    if flag.ge is not None and value < flag.ge:
        raise ConfigError(f"{where}: must be at least {flag.ge:.15g}, got {value}")
    if flag.le is not None and value > flag.le:
        raise ConfigError(f"{where}: must be at most {flag.le:g}, got {value}")


def _text(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError
    return str(value)


def _integer(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError
    return int(value)


def _size(value: object) -> int:
    """Only decimal suffixes may have fractions, such as `1.5k`."""
    if not isinstance(value, str):
        return _integer(value)
    match = _SIZE.fullmatch(value.strip())
    if match is None:
        return int(value)
    number, suffix = match.groups()
    base = 1024 if suffix.isupper() else 1000
    size = Fraction(number) * base ** _POWERS[suffix.lower()]
    if ("." in number and not suffix.islower()) or size != int(size):
        raise ValueError
    return int(size)


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError
    number = float(value)
    if not math.isfinite(number):
        raise ValueError
    return number


def _switch(value: object) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in _YES + _NO:
        return value.lower() in _YES
    raise ValueError


def _json_object(value: object) -> dict[str, object]:
    if isinstance(value, str):
        value = msgspec.json.decode(value)
    if not isinstance(value, dict):
        raise ValueError
    return {str(key): item for key, item in value.items()}


def _list(value: object) -> list[str]:
    """Reads a JSON list, or any other text as its one item."""
    if isinstance(value, str):
        value = msgspec.json.decode(value) if value.startswith("[") else [value]
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
        raise ValueError
    return list(value)


def _integers(value: object) -> list[int]:
    """Reads a JSON list, several words, or one number."""
    if isinstance(value, str):
        value = msgspec.json.decode(value) if value.startswith("[") else value.replace(",", " ").split()
    items = value if isinstance(value, list | tuple) else [value]
    return [_integer(item) for item in items]


def _shown(value: object) -> str:
    return repr(value) if len(repr(value)) <= 80 else repr(value)[:77] + "..."


_READERS = {
    FlagKind.TEXT: _text,
    FlagKind.INT: _integer,
    FlagKind.SIZE: _size,
    FlagKind.FLOAT: _number,
    FlagKind.BOOL: _switch,
    FlagKind.JSON: _json_object,
    FlagKind.LIST: _list,
    FlagKind.INTS: _integers,
}
