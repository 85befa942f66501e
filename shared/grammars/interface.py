"""The interface of the engines of structured output."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from blockyard.shared.messages import Grammar

MaskWords = npt.NDArray[np.int32]  # bit i % 32 of word i // 32 is set if token i is allowed


class GrammarError(Exception):
    """A grammar that this engine does not take. The message names the cause, in words for the client."""


class UnsupportedGrammar(GrammarError):
    """A grammar in a language, or with a keyword or option, that this engine does not know. Another one may."""


class MatcherError(Exception):
    """A matcher that broke a limit of a step, or has no token of the vocabulary to go on with. It is of no more use."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of a model."""

    tokenizer_json: str  # `Tokenizer.to_str()`: with the added tokens that tokenizer_config.json declares
    vocab_size: int  # of the logits; ids beyond the tokenizer's are never allowed
    eos_token_ids: Sequence[int]  # end-of-sequence ids of the model

    @property
    def num_mask_words(self) -> int:
        return -(-self.vocab_size // 32)


class Matcher(Protocol):
    """Follows the tokens of one sequence."""

    def accept(self, token_ids: Sequence[int]) -> int:
        """Advances over these tokens. Returns how many of the leading ones the grammar allows.

        An end-of-sequence id is allowed where the output may end, and behind it only further ones. Raises MatcherError.
        """

    def fill(self, words: MaskWords) -> None:
        """Writes the mask of the next token into `words` [num_mask_words] int32, contiguous.

        Where the grammar is complete, the end-of-sequence ids are allowed too; alone, if nothing else may follow. An
        engine may leave out tokens that spell a forced text in another way than the tokenizer does. At least one bit is
        set. Raises MatcherError.
        """

    def is_complete(self) -> bool:
        """Whether the output may end here."""

    def forced(self) -> list[int]:
        """Tokens that must come next, as far as the engine knows them; empty: there may be a choice."""


class CompiledGrammar(Protocol):
    """A source that an engine has taken."""

    def matcher(self) -> Matcher:
        """A matcher at the beginning."""


class Engine(Protocol):
    """A library that makes masks for one vocabulary. Its methods may be called from several threads."""

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Raises GrammarError for a source that it does not take."""
