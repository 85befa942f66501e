"""Decodes JSON of clients into structs; undeclared fields are ignored and reported.

The common case takes one strict decode. A body that fails it is decoded again without types: undeclared fields are
removed at any depth, and whole numbers with a fraction (`4.0`) become integers.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, get_args, get_origin

import msgspec

from blockyard.shared.errors import RequestError

MAX_NAMES = 32  # reported fields of one body
MAX_NAME_CHARS = 64
MAX_WHOLE = 2**53  # larger floats do not determine one integer


@dataclass(frozen=True, slots=True)
class Declared:
    """A struct's declared fields."""

    names: frozenset[str]
    nested: dict[str, "Declared"]  # fields that hold a struct or a list of them
    integers: frozenset[str]  # fields that hold integers, or lists of them, and no other numbers


def decode_known(data: bytes, kind: Any, strict: bool = False) -> tuple[Any, list[str]]:
    """Returns the value and the ignored unknown fields, such as `messages.content.cache_control`.

    With `strict` an unknown field is an error. Raises what `msgspec.json.decode` raises; structs forbid unknown fields.
    """
    try:
        return msgspec.json.decode(data, type=kind), []
    except msgspec.ValidationError as e:
        unknown = str(e).startswith("Object contains unknown field")
        if (unknown and strict) or not (unknown or "got `float`" in str(e)):
            raise
        try:
            value = msgspec.json.decode(data)
        except msgspec.ValidationError:  # a number out of range: the first error is more precise
            raise e from None
    ignored: dict[str, None] = {}
    _remove_undeclared(value, _declared_in(kind), "", None if strict else ignored)
    return msgspec.json.decode(msgspec.json.encode(value), type=kind), list(ignored)


def read_raw(raw: msgspec.Raw, field: str) -> Any:
    """The value of a field that a struct keeps as JSON text.

    Raises RequestError: that the text is JSON is known, but not whether its numbers fit into floats, or its nesting.
    """
    try:
        return msgspec.json.decode(raw)
    except msgspec.ValidationError as e:
        raise RequestError(f"{field}: {e}".replace("`$", f"`{field}"), field) from e
    except RecursionError as e:
        raise RequestError(f"{field} is nested too deeply", field) from e


def _remove_undeclared(value: object, declared: Declared | None, where: str, ignored: dict[str, None] | None) -> None:
    """Changes `value` in place. `ignored` None: unknown fields stay, for the decoder to refuse."""
    if declared is None:
        return
    if isinstance(value, list):
        for item in value:
            _remove_undeclared(item, declared, where, ignored)
    elif isinstance(value, dict):
        if ignored is not None:
            _remove_unknown(value, declared, where, ignored)
        for name in declared.integers & value.keys():
            value[name] = _as_integer(value[name])
        for name, inner in declared.nested.items():
            if name in value:
                _remove_undeclared(value[name], inner, f"{where}{name}.", ignored)


def _remove_unknown(value: dict[str, Any], declared: Declared, where: str, ignored: dict[str, None]) -> None:
    for name in [name for name in value if name not in declared.names]:
        del value[name]
        if len(ignored) < MAX_NAMES:
            ignored[where + name[:MAX_NAME_CHARS]] = None


def _as_integer(value: object) -> object:
    if isinstance(value, float) and value.is_integer() and abs(value) <= MAX_WHOLE:
        return int(value)
    return [_as_integer(item) for item in value] if isinstance(value, list) else value


@cache
def _declared(kind: type[msgspec.Struct]) -> Declared:
    nested: dict[str, Declared] = {}
    integers: list[str] = []
    for field in msgspec.structs.fields(kind):
        inner, leaves = _declared_in(field.type), set(_leaves(field.type))
        if inner is not None:
            nested[field.encode_name] = inner
        if int in leaves and float not in leaves:
            integers.append(field.encode_name)
    names = frozenset(field.encode_name for field in msgspec.structs.fields(kind))
    return Declared(names, nested, frozenset(integers))


def _declared_in(annotation: Any) -> Declared | None:
    """Returns the fields of the struct in an annotation such as `list[Message] | None`."""
    for leaf in _leaves(annotation):
        if isinstance(leaf, type) and issubclass(leaf, msgspec.Struct):
            return _declared(leaf)
    return None


def _leaves(annotation: Any) -> Iterator[Any]:
    """Yields the types in an annotation: through unions and lists, not into dicts."""
    if get_origin(annotation) is dict or not get_args(annotation):
        yield annotation
        return
    for argument in get_args(annotation):
        yield from _leaves(argument)
