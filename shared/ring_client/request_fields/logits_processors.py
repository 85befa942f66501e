"""Logits processors that a request names: checked against the operator's pattern, and never imported here."""

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from blockyard.shared.errors import RequestError
from blockyard.shared.messages import LogitsProcessor

FIELD = "logits_processors"
MAX_PROCESSORS = 16
MAX_NAME_CHARS = 200
MAX_ARGUMENT_BYTES = 64 * 1024


class _Named(msgspec.Struct, forbid_unknown_fields=True):
    qualname: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}


def read_logits_processors(value: object, pattern: str, defaults: Sequence[str]) -> list[LogitsProcessor]:
    """Reads a list of importable names, or of {"qualname", "args", "kwargs"}. Raises RequestError.

    pattern: a regular expression that a whole name has to match; empty: no processor is allowed. defaults: names of the
    deployment's own processors, which come first.
    """
    own = [LogitsProcessor(name) for name in defaults]
    if value is None or value == []:
        return own
    try:
        named = msgspec.convert(value, list[str | _Named])
    except msgspec.ValidationError as e:
        raise RequestError(f"{FIELD}: {e}", FIELD) from e
    if not pattern:
        raise RequestError(f"{FIELD} needs a server with --logits-processor-pattern", FIELD)
    if len(named) > MAX_PROCESSORS:
        raise RequestError(f"{FIELD} has at most {MAX_PROCESSORS} entries, got {len(named)}", FIELD)
    return own + [_read(one if isinstance(one, _Named) else _Named(one), pattern) for one in named]


def _read(one: _Named, pattern: str) -> LogitsProcessor:
    if len(one.qualname) > MAX_NAME_CHARS or re.fullmatch(pattern, one.qualname) is None:
        raise RequestError(
            f"{FIELD}: --logits-processor-pattern does not allow {one.qualname[:MAX_NAME_CHARS]!r}", FIELD
        )
    args, kwargs = (msgspec.json.encode(part) if part else b"" for part in (one.args, one.kwargs))
    if len(args) + len(kwargs) > MAX_ARGUMENT_BYTES:
        raise RequestError(f"{FIELD}: arguments of {one.qualname} are longer than {MAX_ARGUMENT_BYTES} bytes", FIELD)
    return LogitsProcessor(one.qualname, args, kwargs)
