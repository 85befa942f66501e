"""A flag's value from text (command line, environment) or from YAML's and Python's types."""

import math

import msgspec

from blockyard.shared.config.flags.flag import Flag, Kind
from blockyard.shared.errors import ConfigError

_YES = ("true", "yes", "on", "1")
_NO = ("false", "no", "off", "0")
_NONE = ("none", "null", "")


def coerce(flag: Flag, value: object, where: str) -> object:
    """The value in the flag's kind, within its choices and range. Raises ConfigError naming `where`.

    None, and the text `None` for a flag that may be unset, are None.
    """
    if value is None or (flag.default is None and isinstance(value, str) and value.lower() in _NONE):
        return flag.default
    try:
        typed = _READERS[flag.kind](value)
    except (ValueError, msgspec.DecodeError) as e:
        article = "an" if flag.kind is Kind.INT else "a"
        raise ConfigError(f"{where}: expected {article} {flag.kind}, got {_shown(value)}") from e
    _check_choice(flag, typed, where)
    _check_range(flag, typed, where)
    return typed


def is_switch_word(text: str) -> bool:
    return text.lower() in ("true", "false")


def _check_choice(flag: Flag, value: object, where: str) -> None:
    if flag.choices and str(value) not in flag.choices and str(value) not in flag.refused_values:
        raise ConfigError(f"{where}: {_shown(value)} is none of {', '.join(flag.choices)}")


def _check_range(flag: Flag, value: object, where: str) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return
    if flag.least is not None and value < flag.least:
        raise ConfigError(f"{where}: must be at least {flag.least:g}, got {value}")
    if flag.most is not None and value > flag.most:
        raise ConfigError(f"{where}: must be at most {flag.most:g}, got {value}")


def _text(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError
    return str(value)


def _integer(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError
    return int(value)


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
    """A JSON list, or the one item that the text is."""
    if isinstance(value, str):
        value = msgspec.json.decode(value) if value.startswith("[") else [value]
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
        raise ValueError
    return list(value)


def _shown(value: object) -> str:
    return repr(value) if len(repr(value)) <= 80 else repr(value)[:77] + "..."


_READERS = {
    Kind.TEXT: _text,
    Kind.INT: _integer,
    Kind.FLOAT: _number,
    Kind.BOOL: _switch,
    Kind.JSON: _json_object,
    Kind.LIST: _list,
}
