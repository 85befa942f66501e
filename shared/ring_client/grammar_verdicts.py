"""Caches tokenizers' verdicts about grammars, so that a known bad one is refused without asking again.

A grammar that is known to be good needs no check, and its prompt does not wait behind the checks of others.
"""

import hashlib
from collections import OrderedDict

import msgspec

from blockyard.shared.messages import Member, Role, Tokenize

MAX_KNOWN = 4096  # each with at most the 400 characters of its message
TAKEN = ""  # in place of the message of one that is refused


class GrammarVerdicts:
    """By model and grammar. Forgotten when a tokenizer or the model's vocabulary changes."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, str] = OrderedDict()
        self._tokenizers: set[int] = set()
        self._vocabularies: dict[int, tuple[int, list[int]]] = {}  # by scheduler

    def key(self, work: Tokenize) -> bytes | None:
        """None: the work has no grammar."""
        if work.grammar is None:
            return None
        return hashlib.sha256(msgspec.msgpack.encode((work.model, work.grammar))).digest()

    def find(self, key: bytes) -> str | None:
        """Returns why the grammar is refused, TAKEN, or None if that is not known."""
        if (verdict := self._known.get(key)) is not None:
            self._known.move_to_end(key)
        return verdict

    def learn(self, key: bytes, verdict: str) -> None:
        self._known[key] = verdict
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    def changed(self, member: Member) -> None:
        if member.role == Role.TOKENIZER_POOL and member.incarnation not in self._tokenizers:
            self._tokenizers.add(member.incarnation)
            self._known.clear()  # it may have other engines
        elif member.role == Role.SCHEDULER and member.card is not None:
            vocabulary = member.card.vocab_size, member.card.eos_token_ids
            if self._vocabularies.get(member.incarnation) != vocabulary:
                self._vocabularies[member.incarnation] = vocabulary
                self._known.clear()

    def gone(self, member: Member) -> None:
        self._tokenizers.discard(member.incarnation)
        self._vocabularies.pop(member.incarnation, None)
