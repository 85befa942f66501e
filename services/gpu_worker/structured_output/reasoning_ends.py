"""Finds the texts that end reasoning in the tokens of an output, whatever tokens spell them.

The marker's own ids tell the end where it is one token. Where it is several, a model may write it in others: the text
around it decides. Then the grammar would never begin, while a reader of the text sees that reasoning has ended.
"""

import logging
import threading
from collections.abc import Callable, Sequence

from blockyard.services.gpu_worker.structured_output.mask_program import mask_of
from blockyard.services.gpu_worker.structured_output.matcher_frames import MatcherSettings
from blockyard.shared import tokenizer_files
from blockyard.shared.grammars.interface import GrammarError, MaskWords, Vocabulary
from blockyard.shared.grammars.token_texts import token_texts
from blockyard.shared.messages import OutputConstraint

log = logging.getLogger(__name__)


class ReasoningEnds:
    """The end of reasoning, and texts that end it for a reader but are not followed by a grammar."""

    def __init__(self, texts: Sequence[bytes], vocab_size: int, end: str, others: Sequence[str]) -> None:
        """`texts` are the model's tokens."""
        self._texts, self._vocab_size = texts, vocab_size
        self._end, self._others = end.encode(), [one.encode() for one in others]
        self._all = [self._end, *self._others]
        self._inside = [token for token, text in enumerate(texts) if any(one in text for one in self._all)]
        self._banned: dict[bytes, MaskWords] = {}  # by what the output ends with

    def follow(self, before: bytes, token: int) -> tuple[bytes, bool]:
        """Returns the tail of the output behind `token` that may begin an end, and whether `token` completes one."""
        text = before + (self._texts[token] if token < len(self._texts) else b"")
        longest = max(map(len, self._all)) - 1
        for start in range(max(len(text) - longest, 0), len(text)):
            if any(one.startswith(text[start:]) for one in self._all):
                return text[start:], self._end in text
        return b"", self._end in text

    def banned(self, before: bytes) -> MaskWords:
        """Tokens that would complete an end, and more than whitespace behind it, or one of the other texts."""
        found = self._banned.get(before)
        if found is None:
            rests = tuple(
                one[size:]
                for one in self._all
                for size in range(1, min(len(before) + 1, len(one)))
                if before.endswith(one[:size])
            )
            tokens = {token for token, text in enumerate(self._texts) if text.startswith(rests)} if rests else set()
            wrong = [token for token in tokens.union(self._inside) if self._is_wrong(before + self._texts[token])]
            found = self._banned[before] = mask_of(wrong, self._vocab_size)
        return found

    def _is_wrong(self, text: bytes) -> bool:
        at = text.find(self._end)
        return bool(at >= 0 and text[at + len(self._end) :].strip()) or any(one in text for one in self._others)


class EndsByText:
    """The `ReasoningEnds` of a process, made when they are first needed. Several threads may use it."""

    def __init__(self, load_texts: Callable[[], list[bytes]], vocab_size: int) -> None:
        """load_texts: returns the text of each token. May raise GrammarError: ids alone tell the ends then."""
        self._load, self._vocab_size = load_texts, vocab_size
        self._texts: list[bytes] | None = None
        self._made: dict[tuple[str, ...], ReasoningEnds | None] = {}  # few: a deployment has one
        self._lock = threading.Lock()

    def are_ready(self, constraint: OutputConstraint) -> bool:
        """Whether `of` takes no time."""
        return not constraint.end or (constraint.end, *constraint.other_ends) in self._made

    def of(self, constraint: OutputConstraint) -> ReasoningEnds | None:
        if not constraint.end:
            return None
        key = (constraint.end, *constraint.other_ends)
        with self._lock:
            if key not in self._made:
                self._made[key] = self._make(constraint)
            return self._made[key]

    def _make(self, constraint: OutputConstraint) -> ReasoningEnds | None:
        try:
            self._texts = self._load() if self._texts is None else self._texts
        except GrammarError as e:
            log.warning("the end of reasoning is known by its tokens alone: %s", e)
            return None
        return ReasoningEnds(self._texts, self._vocab_size, constraint.end, constraint.other_ends)


def load_texts(settings: MatcherSettings) -> list[bytes]:
    """The text of each token of the model, also of special ones. Raises GrammarError."""
    tokenizer = tokenizer_files.load(settings.tokenizer_path).tokenizer
    texts = token_texts(Vocabulary(tokenizer.to_str(), settings.vocab_size, settings.eos_token_ids))
    for token, added in tokenizer.get_added_tokens_decoder().items():
        if token < len(texts):
            texts[token] = added.content.encode()
    return texts
