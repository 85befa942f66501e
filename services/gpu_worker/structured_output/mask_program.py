"""Which tokens a constrained choice may take next: a grammar, from the start or behind a marker, with lists of ids."""

import functools
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from blockyard.services.gpu_worker.structured_output.mask_memory import num_mask_words
from blockyard.services.gpu_worker.structured_output.matcher_frames import OutputRules
from blockyard.shared.grammars.interface import CompiledGrammar, MaskWords, MatcherError


class EndsOfReasoning(Protocol):
    """`reasoning_ends.ReasoningEnds`."""

    def follow(self, before: bytes, token: int) -> tuple[bytes, bool]: ...
    def banned(self, before: bytes) -> MaskWords: ...


class MaskProgram:
    """Follows the output of one choice. The same outputs give the same mask, in whatever pieces they are accepted.

    1. Without `begin_after` the grammar begins with the first output token. With it, every token is allowed until the
       output ends with the marker, except for end-of-sequence ids if a grammar is to follow. Once `budget` tokens are
       there without it, only the marker's next token is allowed. With `end` the output's text is compared, too: tokens
       that end reasoning and go on behind it are not allowed if a grammar is to follow. With `only_behind`, all this
       holds for output that begins with those ids; the grammar of other output begins with the first token. Output that
       may be either is allowed what the grammar allows, and the next of these ids.
    2. Behind the marker, or from the start, the grammar decides. Without a grammar every token is allowed. Once
       `budget` tokens are there, `inner_end` alone is allowed wherever the grammar allows it.
    3. `allowed_token_ids` limit all of it.
    4. End-of-sequence and stop ids are banned below `min_tokens`, and end-of-sequence ids with `ignore_eos`.

    Rules 3 and 4 do not apply to the end-of-sequence ids of a complete grammar that allows nothing else: the output
    ends there. So an end-of-sequence id in the output of a constrained choice always ends it.
    """

    def __init__(
        self,
        rules: OutputRules,
        compiled: CompiledGrammar | None,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        ends: EndsOfReasoning | None = None,
    ) -> None:
        """compiled: of the grammar in `rules`, None without one. ends: of the constraint's `end`; None: ids tell."""
        constraint = rules.constraint
        self._ends, self._tail = ends, b""  # what the text ends with, as far as it may begin an end
        self._marker, self._budget = constraint.begin_after, constraint.budget
        self._inner_end = constraint.inner_end
        self._matched = 0  # leading tokens of the marker that the output ends with
        self._fallback = _failure_links(self._marker)
        self._before_marker = bool(self._marker)
        self._start = constraint.only_behind if self._marker else []
        self._started = 0  # ids of `_start` that the output has
        self._may_start = bool(self._start)  # the output is no more than a part of `_start`
        self._compiled = compiled
        self._matcher = None if compiled is None else compiled.matcher()
        self._eos = frozenset(eos_token_ids)
        self._min_tokens, self._ignore_eos = rules.min_tokens, rules.ignore_eos
        self._free = free_mask(vocab_size)
        self._allowed = mask_of(rules.allowed_token_ids, vocab_size) if rules.allowed_token_ids else None
        self._eos_mask = mask_of(self._eos, vocab_size)
        self._end_mask = mask_of({*self._eos, *rules.stop_token_ids}, vocab_size)
        self._end_places: list[int] = np.flatnonzero(self._end_mask).tolist()
        self.num_outputs = 0
        self.has_ended = False  # the last token was an end-of-sequence id

    def accept(self, token_ids: Sequence[int]) -> None:
        """Advances over output tokens. Raises MatcherError for one that the grammar does not allow."""
        for place, token in enumerate(token_ids):
            if self._may_start:
                self._accept_start(token)
                self.num_outputs += 1
            elif self._before_marker:
                self._accept_before_marker(token)
                self.num_outputs += 1
            else:
                self._accept_grammar(token_ids[place:])
                return

    def fill(self, words: MaskWords) -> None:
        """Writes the mask of the next token. Raises MatcherError if no token is allowed."""
        if self._may_start:
            self._fill_start(words)
        elif self._before_marker:
            forced = self._budget is not None and self.num_outputs >= self._budget
            words[:] = self._free
            if forced:
                words[:] = 0
                _set_bit(words, self._marker[self._matched])
                self._limit(words, complete=False, bans_ends=False)
            else:
                if self._compiled is not None:
                    words &= ~self._eos_mask
                    if self._ends is not None:
                        words &= ~self._ends.banned(self._tail)
                self._limit(words, complete=False, bans_ends=True)
        elif self._matcher is None:
            words[:] = self._free
            self._limit(words, complete=False, bans_ends=True)
        else:
            self._matcher.fill(words)
            if self._inner_end is not None:
                self._close(words, self._inner_end)
            self._limit(words, complete=True, bans_ends=True)

    def _close(self, words: MaskWords, end: int) -> None:
        """Leaves the end of reasoning alone where it is allowed and the budget is used up."""
        if self._budget is not None and self.num_outputs >= self._budget and _has_bit(words, end):
            words[:] = 0
            _set_bit(words, end)

    def _fill_start(self, words: MaskWords) -> None:
        words[:] = self._free
        if self._matcher is not None:
            self._matcher.fill(words)
        elif self._compiled is not None:
            words[:] = 0  # the output is outside of the grammar: it can only begin with the marker
        _set_bit(words, self._start[self._started])
        self._limit(words, complete=True, bans_ends=True)

    def _accept_start(self, token: int) -> None:
        """Advances both what the output may be, until it is one of them."""
        is_marker = token == self._start[self._started]
        self.has_ended = token in self._eos
        is_grammar = self._compiled is None or (
            self._matcher is not None and (self.has_ended or self._matcher.accept([token]) == 1)
        )
        if not (is_marker or is_grammar):
            raise MatcherError(f"token {token} is outside of the grammar, and begins no marker")
        self._started += is_marker
        if is_marker and self._started == len(self._start):
            self._may_start = False
            self._matcher = None if self._compiled is None else self._compiled.matcher()
        elif is_marker and not is_grammar:
            self._matcher = None
        elif not is_marker:
            self._may_start = self._before_marker = False

    def _accept_before_marker(self, token: int) -> None:
        marker = self._marker
        while self._matched and marker[self._matched] != token:
            self._matched = self._fallback[self._matched - 1]
        if marker[self._matched] == token:
            self._matched += 1
        self._before_marker = self._matched < len(marker)
        if self._ends is not None:
            self._tail, is_end = self._ends.follow(self._tail, token)
            self._before_marker &= not is_end
        self.has_ended = self._before_marker and token in self._eos

    def _accept_grammar(self, token_ids: Sequence[int]) -> None:
        """Advances the grammar. End-of-sequence ids are not the grammar's: it allows them where it is complete."""
        end = next((place for place, token in enumerate(token_ids) if token in self._eos), len(token_ids))
        self.has_ended = end < len(token_ids)
        if self._matcher is not None and end:
            taken = self._matcher.accept(token_ids[:end])
            if taken < end:
                self.num_outputs += taken
                raise MatcherError(f"token {token_ids[taken]} is outside of the grammar")
        self.num_outputs += len(token_ids)

    def _limit(self, words: MaskWords, complete: bool, bans_ends: bool) -> None:
        """Applies rules 3 and 4. complete: where the mask allows end-of-sequence ids, a grammar is complete."""
        banned = None
        if bans_ends and self.num_outputs < self._min_tokens:
            banned = self._end_mask
        elif bans_ends and self._ignore_eos:
            banned = self._eos_mask
        if self._allowed is None and banned is None:
            return  # a matcher raises an error if it allows nothing
        if self._allowed is None and banned is not None and not any(words[at] & banned[at] for at in self._end_places):
            return  # nothing to ban: nearly every mask of a grammar
        ends = words & self._eos_mask
        if self._allowed is not None:
            words &= self._allowed
        if banned is not None:
            words &= ~banned
        if words.any():
            return
        if not complete or not ends.any():
            raise MatcherError(
                "the grammar allows no token" + (" of allowed_token_ids" if self._allowed is not None else "")
            )
        words[:] = ends


def mask_of(token_ids: Iterable[int], vocab_size: int) -> MaskWords:
    """A mask that allows these ids; ids outside the vocabulary are left out."""
    words = np.zeros(num_mask_words(vocab_size), np.int32)
    ids = np.array([token for token in token_ids if 0 <= token < vocab_size], np.uint32)
    np.bitwise_or.at(words.view(np.uint32), ids >> 5, np.uint32(1) << (ids & 31))
    return words


@functools.cache
def free_mask(vocab_size: int) -> MaskWords:
    """A mask that allows all tokens. All callers share it."""
    words = np.full(num_mask_words(vocab_size), -1, np.int32)
    if rest := vocab_size % 32:
        words.view(np.uint32)[-1] = (1 << rest) - 1
    words.flags.writeable = False
    return words


def _set_bit(words: MaskWords, token: int) -> None:
    words.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)


def _has_bit(words: MaskWords, token: int) -> bool:
    return bool(words.view(np.uint32)[token // 32] >> np.uint32(token % 32) & np.uint32(1))


def _failure_links(marker: list[int]) -> list[int]:
    """For each leading part of the marker, the length of the longest shorter one that it ends with."""
    links = [0] * len(marker)
    length = 0
    for place in range(1, len(marker)):
        while length and marker[place] != marker[length]:
            length = links[length - 1]
        length += marker[place] == marker[length]
        links[place] = length
    return links
