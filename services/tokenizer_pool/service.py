"""The loop of a tokenizer: answers each request of a gateway on the same link."""

import logging
from collections import Counter
from typing import Protocol

import msgspec

from blockyard.services.tokenizer_pool.workers.worker_frames import Answer, Work
from blockyard.shared.bus.links import Links
from blockyard.shared.bus.member_list import Changed, Event, Joined
from blockyard.shared.messages import (
    BUSY,
    TAKES_LONG,
    Detokenize,
    Frame,
    Grammar,
    Member,
    RefusalCount,
    Stats,
    TextRejected,
    TextsTokenized,
    Tokenize,
    Tokenized,
    TokenizerIn,
    TokenizeTexts,
)
from blockyard.shared.process.service_main import rss_bytes
from blockyard.shared.token_ids import num_ids

log = logging.getLogger(__name__)


class TokenizerLinks(Protocol):
    """The methods of its links that the service uses."""

    def answer(self, to: int, frame: Frame) -> bool: ...

    def count(self, stats: Stats) -> None: ...


class TextWorkers(Protocol):
    """The methods of `JobWorkers` that the service uses."""

    def set_model(self, vocab_size: int, max_model_len: int) -> bool: ...

    def submit(self, peer: int, work: Work) -> None: ...


class GrammarChecker(Protocol):
    """The methods of `GrammarChecks` that the service uses."""

    def set_model(self, vocab_size: int, eos_token_ids: list[int]) -> None: ...

    def submit(self, peer: int, work: Tokenize) -> None: ...


class TokenizerPool:
    """One replica. Stateless between requests, so a gateway may ask any."""

    def __init__(
        self,
        links: TokenizerLinks,
        worker: TextWorkers,
        served_model_names: list[str],
        checks: GrammarChecker,
    ) -> None:
        self._links = links
        self._worker = worker
        self._checks = checks
        self._grammars: dict[tuple[int, str], Grammar] = {}  # of prompts at the text worker, by peer and request id
        self._names = frozenset(served_model_names)
        self._requests_total = 0
        self._prompt_tokens_total = 0
        self._refused: Counter[str] = Counter()  # grammars, by reason

    async def run(self, links: "Links[TokenizerIn]") -> None:
        """Serves until cancelled."""
        async for peer, event in links:
            self.handle(peer, event)

    def handle(self, peer: int, event: "TokenizerIn | Event") -> None:
        match event:
            case Tokenize(grammar=Grammar()):
                self._checks.submit(peer, event)
            case Tokenize() | TokenizeTexts() | Detokenize():
                self._worker.submit(peer, event)
            case Joined() | Changed():
                self._learn(event.member)

    def count(self) -> None:
        """Publishes the counters."""
        self._links.count(
            Stats(
                requests_total=self._requests_total,
                prompt_tokens_total=self._prompt_tokens_total,
                rss_bytes=rss_bytes(),
                refused=[RefusalCount(reason, total) for reason, total in self._refused.items()],
            )
        )

    def on_verdict(self, peer: int, work: Tokenize, verdict: Grammar | TextRejected) -> None:
        """The prompt of a grammar goes to the text worker once the grammar is taken, and without it."""
        if isinstance(verdict, TextRejected):
            if verdict.code != TAKES_LONG:  # such a grammar comes again
                self._refused["busy" if verdict.code == BUSY else "invalid"] += 1
            self.on_answer(peer, verdict)
            return
        self._grammars[peer, work.request_id] = verdict
        self._worker.submit(peer, msgspec.structs.replace(work, grammar=None))

    def on_answer(self, peer: int, answer: Answer) -> None:
        self._requests_total += not (isinstance(answer, TextRejected) and answer.code == TAKES_LONG)
        grammar = self._grammars.pop((peer, answer.request_id), None)
        if isinstance(answer, Tokenized | TextsTokenized):
            self._prompt_tokens_total += num_ids(answer.token_ids)
            if grammar is not None and isinstance(answer, Tokenized):
                answer = msgspec.structs.replace(answer, grammar=grammar)
        self._links.answer(peer, answer)

    def _learn(self, member: Member) -> None:
        """Takes the model's vocabulary size from the scheduler's card: it may differ from the tokenizer's."""
        card = member.card
        if card is None or (self._names and not self._names.intersection(card.names)):
            return
        self._checks.set_model(card.vocab_size, card.eos_token_ids)
        if self._worker.set_model(card.vocab_size, card.max_model_len):
            log.info("the vocabulary has %d ids", card.vocab_size)
