"""The sampling and text fields of a request, checked against their ranges and the model's vocabulary."""

from collections.abc import Mapping
from typing import Any, Protocol

from blockyard.shared.errors import RequestError
from blockyard.shared.messages import DEFAULT_SAMPLING, Sampling, SamplingDefaults, TextOptions
from blockyard.shared.ring_client.request_fields import limits

SEED_LOW, SEED_HIGH = -(2**63), 2**64 - 1  # as signed or as unsigned
FITTING = -1  # of truncate_prompt_tokens: as many ids as fit


class SamplingRequest(Protocol):
    """Fields that HTTP requests and the offline API's SamplingParams share. None: not given."""

    @property
    def n(self) -> int | None: ...
    @property
    def best_of(self) -> int | None: ...
    @property
    def seed(self) -> int | None: ...
    @property
    def stop(self) -> str | list[str] | None: ...
    @property
    def stop_token_ids(self) -> list[int] | None: ...
    @property
    def include_stop_str_in_output(self) -> bool | None: ...
    @property
    def min_tokens(self) -> int | None: ...
    @property
    def ignore_eos(self) -> bool | None: ...
    @property
    def skip_special_tokens(self) -> bool | None: ...
    @property
    def spaces_between_special_tokens(self) -> bool | None: ...
    @property
    def bad_words(self) -> list[str] | None: ...
    @property
    def allowed_token_ids(self) -> list[int] | None: ...
    @property
    def logit_bias(self) -> Mapping[str, float] | Mapping[int, float] | None: ...
    @property
    def truncate_prompt_tokens(self) -> int | None: ...


def read_sampling(request: SamplingRequest, vocab_size: int | None, defaults: SamplingDefaults) -> Sampling:
    """All but max_tokens, the seed, bad words and the numbers of log-probabilities. Raises RequestError.

    `vocab_size` None: the model is not known yet, ids are checked later.
    """
    allowed = request.allowed_token_ids
    if allowed is not None and not allowed:
        raise RequestError("allowed_token_ids is empty: no token would be left", "allowed_token_ids")
    stop_ids = request.stop_token_ids or []
    limits.short("stop_token_ids", stop_ids, limits.MAX_LISTED)
    limits.integer("seed", request.seed, 0, SEED_LOW, SEED_HIGH)
    ranged: dict[str, Any] = {
        name: limits.in_range(name, getattr(request, name), getattr(defaults, name, getattr(DEFAULT_SAMPLING, name)))
        for name in limits.RANGES
    }
    if ranged["top_k"] < 0 or (vocab_size is not None and ranged["top_k"] >= vocab_size):
        ranged["top_k"] = 0
    return Sampling(
        max_tokens=1,
        **ranged,
        ignore_eos=bool(request.ignore_eos),
        stop_token_ids=limits.token_ids("stop_token_ids", stop_ids, vocab_size),
        logit_bias=limits.logit_bias(request.logit_bias, vocab_size),
        allowed_token_ids=sorted(set(limits.token_ids("allowed_token_ids", allowed or [], vocab_size))),
    )


def read_text_options(request: SamplingRequest, tokens_as_ids: bool = False) -> TextOptions:
    return TextOptions(
        stop=limits.stop_strings(request.stop),
        include_stop=bool(request.include_stop_str_in_output),
        skip_special_tokens=request.skip_special_tokens is not False,
        spaces_between_special_tokens=request.spaces_between_special_tokens is not False,
        tokens_as_ids=tokens_as_ids,
        min_tokens=request.min_tokens or 0,
    )


def read_truncation(request: SamplingRequest) -> int | None:
    """How many of the prompt's last ids are kept; None: all. FITTING: see `fitting_truncation`."""
    if request.truncate_prompt_tokens != FITTING:
        limits.integer("truncate_prompt_tokens", request.truncate_prompt_tokens, 1, 1)
    return request.truncate_prompt_tokens


def fitting_truncation(truncate: int | None, max_tokens: int | None, max_model_len: int) -> int | None:
    """Replaces FITTING by what `max_tokens` of output (None: one token) leave of the context. Raises RequestError."""
    if truncate != FITTING:
        return truncate
    left = max_model_len - (1 if max_tokens is None else max_tokens)
    if left < 1:
        raise RequestError(
            f"truncate_prompt_tokens -1 keeps what max_tokens leaves of the context, and {max_tokens} leaves nothing "
            f"of {max_model_len}",
            "truncate_prompt_tokens",
        )
    return left


def read_bad_words(request: SamplingRequest) -> list[str]:
    words = request.bad_words or []
    limits.short("bad_words", words, limits.MAX_LISTED)
    for word in words:
        if not word or len(word) > limits.MAX_STOP_CHARS:
            raise RequestError(
                f"each bad word has 1 to {limits.MAX_STOP_CHARS} characters, got {len(word)}", "bad_words"
            )
    return words


def read_salt(salt: str | None) -> str:
    if salt is None:
        return ""
    if not 1 <= len(salt) <= limits.MAX_SALT_CHARS:
        raise RequestError(f"cache_salt has 1 to {limits.MAX_SALT_CHARS} characters, got {len(salt)}", "cache_salt")
    return salt
