"""Parameters and results of `LLM.beam_search`, with vLLM's names."""

from dataclasses import dataclass

from tokenizers import Tokenizer

from blockyard.services.offline.outputs import CompletionOutput, PositionLogprobs, RequestOutput
from blockyard.services.offline.sampling_params import SamplingParams
from blockyard.shared.errors import RequestError


@dataclass(slots=True)
class BeamSearchParams:
    """The search follows vLLM's rules; `SamplingParams(use_beam_search=True)` follows the rules of transformers.

    Each step looks at the likeliest 2 * `beam_width` tokens of each beam, and every beam that ends among them is
    finished. A score is the cumulative log-probability divided by `length ** length_penalty`, where the length counts
    prompt and output without the end-of-sequence id.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0  # has no effect: beam search does not sample
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False  # has no effect, as in vLLM: `tokens` keep the end-of-sequence id

    def sampling(self) -> SamplingParams:
        """Raises RequestError, a ValueError, for a value out of range."""
        if self.beam_width < 1:
            raise RequestError(f"beam_width must be at least 1, got {self.beam_width}", "beam_width")
        return SamplingParams(
            n=self.beam_width,
            use_beam_search=True,
            early_stopping="vllm",
            length_penalty=self.length_penalty,
            temperature=0.0,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            logprobs=0,
        )


@dataclass(slots=True)
class BeamSearchSequence:
    tokens: list[int]  # of the prompt and the output, including the end-of-sequence id
    logprobs: list[PositionLogprobs]  # of the output tokens
    cum_logprob: float
    text: str  # of all tokens except special ones
    finish_reason: str | None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """The sequences of one prompt, best first."""

    sequences: list[BeamSearchSequence]


def beam_output(output: RequestOutput, tokenizer: Tokenizer) -> BeamSearchOutput:
    return BeamSearchOutput([_sequence(output.prompt_token_ids, one, tokenizer) for one in output.outputs])


def _sequence(prompt: list[int], found: CompletionOutput, tokenizer: Tokenizer) -> BeamSearchSequence:
    tokens = prompt + found.token_ids
    return BeamSearchSequence(
        tokens,
        found.logprobs or [],
        found.cumulative_logprob or 0.0,
        tokenizer.decode(tokens, skip_special_tokens=True),
        found.finish_reason,
        found.stop_reason,
    )
