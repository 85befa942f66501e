"""Trial walks through a grammar: texts that find where it leads to no end, or breaks a limit, before a client does.

The first mask says little: a text may be forced for a long way, many branches may open behind the first token, and
names that are left to choose from may all be taken. So a few matchers go a bounded way, each by a rule of its own.
"""

import random
import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from blockyard.shared.grammars.error_texts import one_line
from blockyard.shared.grammars.interface import CompiledGrammar, Matcher, MatcherError

WALK_S = 0.1  # CPU time of all walks of a grammar; that of a JSON schema takes a fifth of it
MOST_MASKS = 48  # of one walk
MOST_TOKENS = 20_000  # of one walk, with the forced ones
SHOWN_CHARS = 30  # of the text before the place where a walk ended
# Signs that a walk prefers to other tokens, the first one most.
ON = b'":,{[0'  # to the next property or item ...
OUT = b'}]"0:{['  # ... or to the end
Bits = npt.NDArray[np.bool_]


class TrialWalks:
    def __init__(self, texts: Sequence[bytes], num_mask_words: int) -> None:
        """texts: of each id of the model; b"" for ids that no text has."""
        self._texts, self._num_words = texts, num_mask_words
        self._have_text = np.array([bool(text) for text in texts])
        self._are_visible = np.array([bool(text.strip()) for text in texts])
        self._signs = {text: token_id for token_id, text in enumerate(texts) if len(text) == 1}
        lengths = np.array([len(text) for text in texts], np.int64)
        # of a short token the most texts can follow; where nothing but whitespace may, a long one leads out of it
        self._widest = np.argsort(np.where(self._are_visible, lengths, 1_000_000 - lengths), kind="stable")

    def check(self, compiled: CompiledGrammar) -> None:
        """Raises MatcherError if a walk comes to a place where no text goes on and none ends."""
        until_s = time.process_time() + WALK_S
        for choose in (self._prefer(ON), self._prefer(OUT), self._at_random()):
            written: list[int] = []
            try:
                self._walk(compiled.matcher(), choose, written, until_s)
            except MemoryError:
                raise
            except Exception as e:  # libraries raise many kinds, and each concerns this grammar alone
                text = b"".join(self._texts[i] for i in written).decode("utf-8", "replace")
                cause = one_line(e) or type(e).__name__
                if not text:
                    raise MatcherError(f"the grammar allows no first token of this model: {cause}") from e
                raise MatcherError(f"the grammar cannot be followed behind {text[-SHOWN_CHARS:]!r}: {cause}") from e

    def _walk(self, matcher: Matcher, choose: Callable[[Bits], int], written: list[int], until_s: float) -> None:
        words = np.zeros(self._num_words, np.int32)
        for _ in range(MOST_MASKS):
            try:
                matcher.fill(words)
            except MatcherError:
                if matcher.is_complete():  # without end-of-sequence ids the mask of a whole text is empty
                    return
                raise
            if time.process_time() >= until_s or len(written) >= MOST_TOKENS:
                return
            chosen = matcher.forced()
            if not chosen:
                bits = np.unpackbits(words.view(np.uint8), count=len(self._texts), bitorder="little").view(np.bool_)
                bits &= self._have_text
                if not bits.any():
                    return  # the text ends, or goes on with a special token
                chosen = [choose(bits)]
            written += chosen
            taken = matcher.accept(chosen)
            if taken < len(chosen):
                raise MatcherError(f"token {chosen[taken]} is outside of the grammar")

    def _prefer(self, signs: bytes) -> Callable[[Bits], int]:
        ids = [token_id for sign in signs if (token_id := self._signs.get(bytes([sign]))) is not None]

        def choose(bits: Bits) -> int:
            found = next((token_id for token_id in ids if bits[token_id]), None)
            return self._choose_widest(bits) if found is None else found

        return choose

    def _at_random(self) -> Callable[[Bits], int]:
        rng = random.Random(0)

        def choose(bits: Bits) -> int:
            visible = np.flatnonzero(bits & self._are_visible)
            return int(visible[rng.randrange(len(visible))]) if len(visible) else self._choose_widest(bits)

        return choose

    def _choose_widest(self, bits: Bits) -> int:
        return int(self._widest[bits[self._widest].argmax()])
