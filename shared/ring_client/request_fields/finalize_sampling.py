"""Completes a request's sampling once the ids of its prompt are known."""

import secrets
from collections.abc import Sequence

import msgspec

from blockyard.shared.errors import RequestError, TooLong
from blockyard.shared.messages import ModelCard, OutputConstraint, Sampling, Tokenized
from blockyard.shared.token_ids import num_ids

CALL_TOKENS = 256  # of `max_tokens`, left for a forced call


def finalize_sampling(
    sampling: Sampling,
    prompt: Tokenized,
    *,
    card: ModelCard,
    max_tokens: int | None,
    seed: int | None,
    max_new_tokens: int | None = None,
    prompt_field: str = "prompt",
    thinking_budget: int | None = None,
    call_is_forced: bool = False,
) -> Sampling:
    """Returns the sampling of this prompt, with its bad words, its own stop tokens and its grammar.

    Where the model reasons first, the grammar begins behind the end of reasoning (`card` has its texts), and
    `thinking_budget` limits the output tokens up to there; 0 is no reasoning beside a grammar. A forced call has room
    behind reasoning: `CALL_TOKENS`, or half of the output. `max_tokens` is limited to the rest of the context, and None
    means all of it; `max_new_tokens` caps it. A missing seed is drawn at random. Raises RequestError if the prompt does
    not fit or no token could be sampled.
    """
    num_prompt_tokens, bad_words = num_ids(prompt.token_ids), prompt.bad_words
    if num_prompt_tokens == 0:
        raise RequestError(f"`{prompt_field}` is empty: not one token", prompt_field)
    left = card.max_model_len - num_prompt_tokens
    if left < (0 if max_tokens == 0 else 1):
        raise _too_long(num_prompt_tokens, card.max_model_len, prompt_field)
    wanted = left if max_tokens is None else min(max_tokens, left)
    if max_new_tokens is not None:
        wanted = min(wanted, max_new_tokens)
    if sampling.min_tokens > wanted > 0:
        raise RequestError(f"min_tokens is {sampling.min_tokens}, and at most {wanted} can be generated", "min_tokens")
    _check_choice(sampling, bad_words, card.eos_token_ids)
    # max_tokens 0 asks for the prompt's log-probabilities: one token is sampled if it fits, and not shown
    seed = secrets.randbits(64) if seed is None else seed % 2**64
    if call_is_forced:
        most = wanted - min(wanted // 2, CALL_TOKENS)
        thinking_budget = most if thinking_budget is None else min(thinking_budget, most)
    constraint, tools = None, card.settings.tools
    if prompt.grammar is not None and (not prompt.begin_after or (prompt.only_behind and thinking_budget == 0)):
        constraint = OutputConstraint(prompt.grammar)
        if prompt.inner_end is not None:
            constraint = OutputConstraint(prompt.grammar, budget=thinking_budget, inner_end=prompt.inner_end)
    elif prompt.begin_after:
        constraint = OutputConstraint(
            prompt.grammar,
            prompt.begin_after,
            thinking_budget,
            prompt.only_behind,
            tools.reasoning_end,
            tools.reasoning_other_ends,
        )
    ends = [] if sampling.ignore_eos else [one for one in prompt.eos_token_ids if one not in card.eos_token_ids]
    if prompt.stop_token_ids or ends:
        stops = [*sampling.stop_token_ids, *prompt.stop_token_ids, *ends]
        sampling = msgspec.structs.replace(sampling, stop_token_ids=stops)
    return msgspec.structs.replace(
        sampling, max_tokens=min(max(wanted, 1), left), seed=seed, bad_words=bad_words, constraint=constraint
    )


def _too_long(num_prompt_tokens: int, context: int, prompt_field: str) -> RequestError:
    more = ", and the output needs at least one" if num_prompt_tokens == context else ""
    return RequestError(
        f"This model's maximum context length is {context} tokens. However, your request has {num_prompt_tokens} "
        f"input tokens{more}. Please reduce the length of the {prompt_field}.",
        prompt_field,
        code="context_length_exceeded",
        too_long=TooLong(num_prompt_tokens, context - 1 if more else context),
    )


def _check_choice(sampling: Sampling, bad_words: list[list[int]], eos_token_ids: Sequence[int]) -> None:
    """Raises RequestError if all allowed tokens are forbidden: as bad words, or as endings before min_tokens."""
    allowed = sampling.allowed_token_ids
    if not allowed:
        return
    forbidden = {words[0] for words in bad_words if len(words) == 1}
    if sampling.min_tokens:
        forbidden.update(eos_token_ids, sampling.stop_token_ids)
    if forbidden.issuperset(allowed):
        cause = "min_tokens" if sampling.min_tokens else "bad_words"
        raise RequestError(f"allowed_token_ids and {cause} together leave no token", "allowed_token_ids")
