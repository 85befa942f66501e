"""What each engine of structured output offers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from blockyard.shared.messages import Grammar

MaskWords = npt.NDArray[np.int32]  # bit i % 32 of word i // 32 is set if token i is allowed


class GrammarError(Exception):
    """A grammar that this engine does not take. The message names the cause, in words for the client."""


class MatcherError(Exception):
    """A matcher that broke a limit of a step or was given a token outside of its grammar. It is of no more use."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of a model."""

    tokenizer_json: str  # content of the model's tokenizer.json
    vocab_size: int  # of the logits; ids beyond the tokenizer's are never allowed
    eos_token_ids: Sequence[int]

    @property
    def num_mask_words(self) -> int:
        return -(-self.vocab_size // 32)


class Matcher(Protocol):
    """Follows the tokens of one sequence."""

    def accept(self, token_ids: Sequence[int]) -> int:
        """Advances over these tokens. Returns how many of the leading ones the grammar allows."""

    def fill(self, words: MaskWords) -> None:
        """Writes the mask of the next token. Where the grammar is complete, end-of-sequence ids are allowed."""

    def is_complete(self) -> bool:
        """Whether the output may end here."""

    def forced(self) -> list[int]:
        """Tokens that must come next, as far as the engine knows them; empty: there is a choice."""

    def roll_back(self, num_tokens: int) -> None:
        """Takes back the last tokens."""

    def copy(self) -> "Matcher":
        """A matcher in the same state. Both go on independently."""


class CompiledGrammar(Protocol):
    """A source that an engine has taken."""

    def matcher(self) -> Matcher:
        """A matcher at the beginning."""


class Engine(Protocol):
    """A library that makes masks for one vocabulary. Its methods may be called from several threads."""

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Raises GrammarError for a source that it does not take."""
