"""One HTTP request once it is checked: what to tokenize, what to generate and how to answer."""

import secrets
from dataclasses import dataclass

import msgspec

from blockyard.services.api_gateway.chunks import Shape
from blockyard.services.api_gateway.errors import ApiError
from blockyard.shared.messages import ModelCard, Sampling, TextOptions, Tokenize


@dataclass(frozen=True, slots=True)
class Job:
    card: ModelCard
    shape: Shape
    prompts: list[Tokenize]  # without request ids
    prompt_field: str  # "messages" or "prompt"
    sampling: Sampling  # max_tokens, seed and bad_words are settled once the prompt's ids are known
    text: TextOptions
    n: int
    seed: int | None
    max_tokens: int | None  # None: what the context leaves
    max_tokens_field: str
    max_new_tokens: int | None  # cap of the deployment
    truncate: int | None  # keep so many of the prompt's last ids
    priority: int
    cache_salt: str

    def settle(self, num_prompt_tokens: int, bad_words: list[list[int]]) -> Sampling:
        """The sampling of a prompt of this length. Raises ApiError where it does not fit the context."""
        context = self.card.max_model_len
        left = context - num_prompt_tokens
        if num_prompt_tokens == 0:
            raise ApiError(f"`{self.prompt_field}` is empty: not one token", self.prompt_field)
        wanted = left if self.max_tokens is None else self.max_tokens
        if left < 1 or wanted > left:
            fits = self.max_tokens is not None and left >= 1
            raise ApiError(
                f"This model's maximum context length is {context} tokens. However, you requested "
                f"{num_prompt_tokens + (self.max_tokens or 0)} tokens ({num_prompt_tokens} in the "
                f"{self.prompt_field}, {self.max_tokens or 0} in the completion). Please reduce the length of the "
                f"{self.prompt_field} or completion.",
                self.max_tokens_field if fits else self.prompt_field,
                code="context_length_exceeded",
            )
        if self.max_new_tokens is not None:
            wanted = min(wanted, self.max_new_tokens)
        if self.sampling.min_tokens > wanted > 0:
            raise ApiError(f"min_tokens is {self.sampling.min_tokens}, more than max_tokens, {wanted}", "min_tokens")
        # max_tokens 0 is a request for the prompt's log-probabilities: one token is drawn and not shown
        seed = secrets.randbits(64) if self.seed is None else self.seed % 2**64
        return msgspec.structs.replace(self.sampling, max_tokens=max(wanted, 1), seed=seed, bad_words=bad_words)
