"""What of a request's sampling can be said only once its prompt's ids are known."""

import secrets

import msgspec

from blockyard.shared.errors import RequestError
from blockyard.shared.messages import Sampling


def settle(
    sampling: Sampling,
    num_prompt_tokens: int,
    bad_words: list[list[int]],
    *,
    context: int,
    max_tokens: int | None,
    seed: int | None,
    max_new_tokens: int | None = None,
    prompt_field: str = "prompt",
    max_tokens_field: str = "max_tokens",
) -> Sampling:
    """The sampling of a prompt of this length in a context of so many tokens.

    `max_tokens` None is what the context leaves; `max_new_tokens` caps it. Without a seed one is drawn.
    Raises RequestError where it does not fit.
    """
    left = context - num_prompt_tokens
    if num_prompt_tokens == 0:
        raise RequestError(f"`{prompt_field}` is empty: not one token", prompt_field)
    wanted = left if max_tokens is None else max_tokens
    if left < 1 or wanted > left:
        fits = max_tokens is not None and left >= 1
        raise RequestError(
            f"This model's maximum context length is {context} tokens. However, you requested "
            f"{num_prompt_tokens + (max_tokens or 0)} tokens ({num_prompt_tokens} in the "
            f"{prompt_field}, {max_tokens or 0} in the completion). Please reduce the length of the "
            f"{prompt_field} or completion.",
            max_tokens_field if fits else prompt_field,
            code="context_length_exceeded",
        )
    if max_new_tokens is not None:
        wanted = min(wanted, max_new_tokens)
    if sampling.min_tokens > wanted > 0:
        raise RequestError(f"min_tokens is {sampling.min_tokens}, more than max_tokens, {wanted}", "min_tokens")
    # max_tokens 0 is a request for the prompt's log-probabilities: one token is drawn and not shown
    seed = secrets.randbits(64) if seed is None else seed % 2**64
    return msgspec.structs.replace(sampling, max_tokens=max(wanted, 1), seed=seed, bad_words=bad_words)
