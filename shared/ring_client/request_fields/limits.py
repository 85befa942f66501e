"""Ranges of the sampling fields: each out-of-range value is a 400 that names its field."""

import math
from collections.abc import Iterable, Mapping, Sized
from typing import Annotated, Any, get_origin, get_type_hints

import msgspec

from blockyard.shared.errors import RequestError
from blockyard.shared.messages import Sampling

MAX_CHOICES = 128  # of one prompt
MAX_PROMPTS = 2048  # of one HTTP request
MAX_ANSWERS = 4096  # of one HTTP request: its prompts times their choices
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_LISTED = 1024  # entries of logit_bias, bad_words, stop_token_ids
MAX_SALT_CHARS = 256
UNLIMITED = -1  # of max_tokens
MOST_TOKENS = 2**32  # more than any context has; larger numbers do not fit into frames
ALL_LOGPROBS = -1  # the whole vocabulary, also as --max-logprobs
MAX_USER_CHARS = 512


# the ranges that `Sampling` declares, by field
RANGES: dict[str, msgspec.Meta] = {
    name: hint.__metadata__[0]
    for name, hint in get_type_hints(Sampling, include_extras=True).items()
    if get_origin(hint) is Annotated
}


def in_range(field: str, value: Any, default: Any) -> Any:
    """`value`, or the default for None, if it is in the range that `Sampling` declares for the field."""
    declared = RANGES[field]
    low, high = declared.ge if declared.gt is None else declared.gt, declared.le
    assert low is not None
    if isinstance(default, int):
        return integer(field, value, default, int(low), None if high is None else int(high))
    return number(field, value, default, low, math.inf if high is None else high, above_low=declared.gt is not None)


def number(
    field: str, value: float | None, default: float, low: float, high: float = math.inf, above_low: bool = False
) -> float:
    """`value` or the default. Must be finite, in [low, high], or in (low, high] with `above_low`."""
    if value is None:
        return default
    if not math.isfinite(value) or value < low or value > high or (above_low and value == low):
        left = f"greater than {low:g}" if above_low else f"at least {low:g}"
        right = "" if math.isinf(high) else f" and at most {high:g}"
        raise RequestError(f"{field} must be {left}{right}, got {value:g}", field)
    return value


def integer(field: str, value: int | None, default: int, low: int, high: int | None = None) -> int:
    if value is None:
        return default
    if value < low or (high is not None and value > high):
        right = "" if high is None else f" and at most {high}"
        raise RequestError(f"{field} must be at least {low}{right}, got {value}", field)
    return value


def max_tokens(field: str, value: int | None, default: int | None, low: int = 1) -> int | None:
    """The most output tokens; None is no limit, for which some clients send -1."""
    if value == UNLIMITED:
        return None
    return default if value is None else integer(field, value, 0, low)


def num_logprobs(field: str, value: int | None, most: int, vocab_size: int) -> int | None:
    """How many candidates of a position are shown; -1, also for `most`, stands for the whole vocabulary."""
    high = vocab_size if most == ALL_LOGPROBS else most
    if value != ALL_LOGPROBS:
        return None if value is None else integer(field, value, 0, 0, high)
    if vocab_size > high:
        raise RequestError(f"{field} -1 is all {vocab_size} tokens, and --max-logprobs is {high}", field)
    return vocab_size


def name(field: str, value: str | None, most: int) -> str:
    """Text of at most so many characters; None is none."""
    if value is not None and len(value) > most:
        raise RequestError(f"{field} has at most {most} characters, got {len(value)}", field)
    return value or ""


def short(field: str, values: Sized, most: int) -> None:
    if len(values) > most:
        raise RequestError(f"{field} may have at most {most} entries, got {len(values)}", field)


def token_ids(field: str, ids: Iterable[int], vocab_size: int | None) -> list[int]:
    """Ids inside the vocabulary; None: its size is not known yet."""
    ids = ids if isinstance(ids, list) else list(ids)
    if ids and (min(ids) < 0 or (vocab_size is not None and max(ids) >= vocab_size)):
        wrong = next(i for i in ids if i < 0 or (vocab_size is not None and i >= vocab_size))
        raise RequestError(
            f"{field}: token id {wrong} is outside the vocabulary" + (f" of {vocab_size}" if vocab_size else ""), field
        )
    return ids


def logit_bias(
    bias: Mapping[str, float] | Mapping[int, float] | None, vocab_size: int | None
) -> list[tuple[int, float]]:
    """By token id; JSON has ids as text."""
    field, out = "logit_bias", []
    short(field, bias or {}, MAX_LISTED)
    for key, value in (bias or {}).items():
        text = str(key)
        if not text.isascii() or not text.isdigit():
            raise RequestError(f"{field} keys are token ids, got {text[:40]!r}", field)
        number(field, value, 0.0, -100.0, 100.0)
        out.append((int(text[:20]), value))
    token_ids(field, (i for i, _ in out), vocab_size)
    return out


def stop_strings(stop: str | list[str] | None) -> list[str]:
    stops = [stop] if isinstance(stop, str) else stop or []
    short("stop", stops, MAX_STOPS)
    for text in stops:
        if not text or len(text) > MAX_STOP_CHARS:
            raise RequestError(f"each stop string has 1 to {MAX_STOP_CHARS} characters, got {len(text)}", "stop")
    return stops
