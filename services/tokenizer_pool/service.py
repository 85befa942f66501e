"""The loop of a tokenizer: requests from gateways, each answered in its turn on the same link."""

import logging
from typing import Protocol

from blockyard.services.tokenizer_pool.texts import Texts
from blockyard.shared.bus import Changed, Joined, Links
from blockyard.shared.member_list import Event
from blockyard.shared.messages import (
    Detokenize,
    Frame,
    Member,
    Stats,
    TextRejected,
    Tokenize,
    TokenizerIn,
)
from blockyard.shared.serving import rss_bytes

log = logging.getLogger(__name__)


class Answers(Protocol):
    """What the service needs of its links."""

    def answer(self, to: int, frame: Frame) -> bool: ...

    def count(self, stats: Stats) -> None: ...


class TokenizerPool:
    """One replica. Stateless between requests, so a gateway may ask any."""

    def __init__(self, links: Answers, texts: Texts, served_model_names: list[str]) -> None:
        self._links = links
        self._texts = texts
        self._names = frozenset(served_model_names)
        self._requests_total = 0
        self._prompt_tokens_total = 0

    async def run(self, links: "Links[TokenizerIn]") -> None:
        """Serves until cancelled."""
        async for peer, event in links:
            self.handle(peer, event)

    def handle(self, peer: int, event: "TokenizerIn | Event") -> None:
        match event:
            case Tokenize():
                answer = self._texts.tokenize(event)
                self._requests_total += 1
                if not isinstance(answer, TextRejected):
                    self._prompt_tokens_total += len(answer.token_ids) // 4
                self._links.answer(peer, answer)
            case Detokenize():
                self._requests_total += 1
                self._links.answer(peer, self._texts.detokenize(event))
            case Joined() | Changed():
                self._learn(event.member)

    def count(self) -> None:
        """Publishes the counters."""
        self._links.count(
            Stats(
                requests_total=self._requests_total,
                prompt_tokens_total=self._prompt_tokens_total,
                rss_bytes=rss_bytes(),
            )
        )

    def _learn(self, member: Member) -> None:
        """The scheduler's card says how many ids the model knows, which may differ from the tokenizer's."""
        card = member.card
        if card is None or card.vocab_size == self._texts.vocab_size:
            return
        if not self._names or self._names.intersection(card.names):
            log.info("the vocabulary has %d ids", card.vocab_size)
            self._texts.vocab_size = card.vocab_size
