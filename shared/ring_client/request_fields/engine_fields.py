"""vLLM's fields for parts of the engine: logits processors, KV transfers, ends at repetitions and of reasoning."""

from typing import Any

import msgspec

from blockyard.shared.errors import RequestError
from blockyard.shared.messages import RepetitionDetection, ToolDefaults
from blockyard.shared.ring_client.request_fields import limits

MAX_OBJECT_BYTES = 64 * 1024  # of JSON that is passed on
MAX_PATTERN = 1024  # tokens; each one costs time at each token of the answer
MAX_REPEATED = 65_536  # tokens of all copies of a pattern
MAX_LOGPROB_IDS = 128
THINKING_BUDGET = "thinking_token_budget"  # the field

Scalar = str | int | float


class RepetitionDetectionParams(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """vLLM's `repetition_detection`. Without a size or a count nothing is detected."""

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0


def read_repetition(
    asked: RepetitionDetectionParams | None, field: str = "repetition_detection"
) -> RepetitionDetection | None:
    """None: nothing is detected. Raises RequestError."""
    if asked is None or (asked.max_pattern_size == 0 and asked.min_pattern_size == 0):
        return None
    largest = limits.integer(f"{field}.max_pattern_size", asked.max_pattern_size, 0, 0, MAX_PATTERN)
    smallest = limits.integer(f"{field}.min_pattern_size", asked.min_pattern_size, 0, 0)
    if smallest > largest:
        raise RequestError(
            f"{field}.min_pattern_size must be at most max_pattern_size, {largest}, got {smallest}",
            f"{field}.min_pattern_size",
        )
    count = limits.integer(f"{field}.min_count", asked.min_count, 0, 2)
    if largest * count > MAX_REPEATED:
        raise RequestError(
            f"{field}: max_pattern_size times min_count is at most {MAX_REPEATED} tokens, got {largest * count}",
            f"{field}.min_count",
        )
    return RepetitionDetection(largest, max(1, smallest), count)


def read_xargs(value: object, field: str = "vllm_xargs") -> bytes:
    """JSON of an object of texts, numbers, and lists of them, for logits processors. Raises RequestError."""
    if value is None:
        return b""
    try:
        known = msgspec.convert(value, dict[str, Scalar | list[Scalar]])
    except msgspec.ValidationError as e:
        raise RequestError(f"{field} has texts, numbers and lists of them: {e}", field) from e
    return _encoded(known, field)


def read_kv_transfer_params(value: object, field: str = "kv_transfer_params") -> bytes:
    """JSON of any object, for the connector of KV transfers. Raises RequestError."""
    if value is None:
        return b""
    if not isinstance(value, dict):
        raise RequestError(f"{field} is an object, got {type(value).__name__}", field)
    return _encoded(value, field)


def read_logprob_ids(
    ids: list[int] | None, shows_logprobs: bool, vocab_size: int | None, field: str = "logprob_token_ids"
) -> list[int]:
    """Tokens to show log-probabilities of in place of the likeliest ones; empty: none. Raises RequestError."""
    if ids is None:
        return []
    if not 1 <= len(ids) <= MAX_LOGPROB_IDS:
        raise RequestError(f"{field} has 1 to {MAX_LOGPROB_IDS} token ids, got {len(ids)}", field)
    if not shows_logprobs:
        raise RequestError(f"{field} needs logprobs", field)
    limits.token_ids(field, ids, vocab_size)
    return list(dict.fromkeys(ids))


def _encoded(value: dict[str, Any], field: str) -> bytes:
    data = msgspec.json.encode(value) if value else b""
    if len(data) > MAX_OBJECT_BYTES:
        raise RequestError(f"{field} is longer than {MAX_OBJECT_BYTES} bytes", field)
    return data


def read_thinking_budget(value: int | None, defaults: ToolDefaults) -> int | None:
    """Most tokens of reasoning; None: no limit. -1 is no limit, too, as in vLLM. Raises RequestError."""
    if value is None or value == -1:
        return None
    budget = min(limits.integer(THINKING_BUDGET, value, 0, 0), limits.MOST_TOKENS)
    if not defaults.reasoning_end:
        raise RequestError(
            f"{THINKING_BUDGET} needs a server with --reasoning-parser, which knows where reasoning ends",
            THINKING_BUDGET,
        )
    return budget
