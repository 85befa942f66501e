"""One HTTP request once it is checked: what to tokenize, what to generate and how to answer."""

from dataclasses import dataclass

from blockyard.services.api_gateway.responses.chunks import Shape
from blockyard.shared.messages import ModelCard, Sampling, TextOptions, Tokenize
from blockyard.shared.ring_client.choices import Choices
from blockyard.shared.ring_client.settle import settle


@dataclass(frozen=True, slots=True)
class Job:
    card: ModelCard
    shape: Shape
    prompts: list[Tokenize]  # without request ids
    prompt_field: str  # "messages" or "prompt"
    sampling: Sampling  # max_tokens, seed and bad_words are settled once the prompt's ids are known
    text: TextOptions
    choices: Choices
    seed: int | None
    max_tokens: int | None  # None: what the context leaves
    max_new_tokens: int | None  # cap of the deployment
    truncate: int | None  # keep so many of the prompt's last ids
    priority: int
    user: str
    cache_salt: str

    def settle(self, num_prompt_tokens: int, bad_words: list[list[int]]) -> Sampling:
        """The sampling of a prompt of this length. Raises RequestError where it does not fit the context."""
        return settle(
            self.sampling,
            num_prompt_tokens,
            bad_words,
            card=self.card,
            max_tokens=self.max_tokens,
            seed=self.seed,
            max_new_tokens=self.max_new_tokens,
            prompt_field=self.prompt_field,
        )
