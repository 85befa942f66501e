"""Common part of all matchers: ends of sequences, dead ends, ids outside of the tokenizer."""

import time
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from blockyard.shared.grammars.interface import MaskWords, MatcherError, Vocabulary

NO_TOKEN = "the grammar allows no token of the model here"
STEP_S = 0.1  # CPU time that one token or mask of a sequence may take


class GrammarState(Protocol):
    """Where one sequence is in its grammar, as a library knows it. It never sees an end-of-sequence token."""

    def advance(self, token_id: int) -> bool:
        """Returns False, and changes nothing, for a token that the grammar does not allow. Raises MatcherError."""

    def write_mask(self, words: MaskWords) -> None:
        """Sets the bit of each allowed token and clears the others. Bits of end-of-sequence ids may have any value."""

    def is_complete(self) -> bool:
        """Whether the text so far is a whole text of the grammar."""

    def forced(self) -> list[int]:
        """Tokens that must come next, if the library knows them."""


class MatcherRules:
    """Rules that the matchers of an engine share: the bits of end-of-sequence ids, and the limit of a step."""

    def __init__(self, vocabulary: Vocabulary, step_s: float = STEP_S) -> None:
        self.step_s = step_s
        self.eos_ids = frozenset(i for i in vocabulary.eos_token_ids if 0 <= i < vocabulary.vocab_size)
        self.num_words = vocabulary.num_mask_words
        self.no_token = bytes(4 * self.num_words)
        self._last_word = np.uint32((1 << (vocabulary.vocab_size - 1) % 32 + 1) - 1).view(np.int32)
        words: dict[int, int] = {}
        for token_id in self.eos_ids:
            words[token_id // 32] = words.get(token_id // 32, 0) | 1 << token_id % 32
        self._words = [(word, np.uint32(bits).view(np.int32)) for word, bits in sorted(words.items())]

    def clear_padding(self, words: MaskWords) -> None:
        """Clears bits of the last word that belong to no id: xgrammar may set them."""
        words[-1] &= self._last_word

    def set_eos(self, words: MaskWords) -> None:
        for word, bits in self._words:
            words[word] |= bits

    def clear_eos(self, words: MaskWords) -> None:
        for word, bits in self._words:
            words[word] &= ~bits


class SequenceMatcher:
    """The `Matcher` of every engine."""

    def __init__(self, state: GrammarState, rules: MatcherRules) -> None:
        self._state = state
        self._rules = rules
        self._num_ends = 0  # end-of-sequence tokens that were accepted
        self._clock = time.perf_counter  # of steps; it costs a tenth of the thread's CPU clock

    def accept(self, token_ids: Sequence[int]) -> int:
        for index, token_id in enumerate(token_ids):
            if token_id in self._rules.eos_ids:
                if not self.is_complete():
                    return index
                self._num_ends += 1
            elif self._num_ends or not self._advance(token_id):
                return index
        return len(token_ids)

    def fill(self, words: MaskWords) -> None:
        if words.shape != (self._rules.num_words,) or words.dtype != np.int32 or not words.flags.c_contiguous:
            raise ValueError(f"a mask is {self._rules.num_words} contiguous int32, got {words.shape} {words.dtype}")
        if self._num_ends:
            words.fill(0)
        else:
            since = self._clock()
            self._state.write_mask(words)
            self._check_time(self._clock() - since)
        self._rules.clear_padding(words)
        if self._num_ends or self._state.is_complete():
            self._rules.set_eos(words)
            if self._rules.eos_ids:
                return
        else:
            self._rules.clear_eos(words)
        if words.tobytes() == self._rules.no_token:  # a tenth of the time of `words.any()`
            raise MatcherError(NO_TOKEN)

    def _advance(self, token_id: int) -> bool:
        since = self._clock()
        accepted = self._state.advance(token_id)
        self._check_time(self._clock() - since)
        return accepted

    def _check_time(self, taken: float) -> None:
        """Raises MatcherError if a step took too much CPU time.

        The work of a step grows from token to token and cannot be stopped, so the first long one ends the matcher. A
        thread that had to wait looks slow, too: so from the first slow step on, CPU time is measured.
        """
        if taken <= self._rules.step_s:
            return
        if self._clock is time.perf_counter:
            self._clock = time.thread_time
            return
        limit = self._rules.step_s
        raise MatcherError(f"the grammar took {taken:.2f} s for one token; at most {limit:g} s are allowed")

    def is_complete(self) -> bool:
        return self._num_ends > 0 or self._state.is_complete()

    def forced(self) -> list[int]:
        return [] if self._num_ends else self._state.forced()


def set_bits(words: MaskWords, token_ids: Sequence[int]) -> None:
    """Clears a mask and sets the bits of these ids. Ids that the mask has no bit for are left out."""
    ids = np.asarray(token_ids, dtype=np.int64)
    bits = np.zeros(len(words) * 32, dtype=np.uint8)
    bits[ids[ids < len(bits)]] = 1
    words[:] = np.packbits(bits, bitorder="little").view(np.int32)
