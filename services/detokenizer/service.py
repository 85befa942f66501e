"""The loop of a detokenizer: receives tokens from schedulers and sends one batch of text per step and gateway."""

from typing import Protocol

from blockyard.services.detokenizer.streams import TextStreams
from blockyard.services.detokenizer.token_table import TokenTable
from blockyard.shared.bus.links import Links
from blockyard.shared.bus.member_list import Changed, Event, Gone, Joined
from blockyard.shared.messages import DetokenizerIn, Frame, Member, PathLost, Stats, Stop, TextBatch, TokenBatch
from blockyard.shared.process.service_main import rss_bytes


class DetokenizerLinks(Protocol):
    """The methods of its links that the service uses."""

    def send(self, to: int, frame: Frame) -> bool: ...

    def answer(self, to: int, frame: Frame) -> bool: ...

    def count(self, stats: Stats) -> None: ...


class Detokenizer:
    """One replica. A stream stays with the replica that its scheduler chose."""

    def __init__(self, links: DetokenizerLinks, table: TokenTable, served_model_names: list[str]) -> None:
        self._links = links
        self._table = table
        self._names = frozenset(served_model_names)
        self.streams = TextStreams(table)
        self._steps_total = 0

    async def run(self, links: "Links[DetokenizerIn]") -> None:
        """Serves until cancelled."""
        async for peer, event in links:
            self.handle(peer, event)

    def handle(self, peer: int, event: "DetokenizerIn | Event") -> None:
        match event:
            case TokenBatch():
                self._on_batch(peer, event)
            case Gone():
                self.streams.drop_peer(event.member.incarnation)
            case Joined() | Changed():
                self._learn(event.member)

    def count(self) -> None:
        """Publishes the counters."""
        self._links.count(
            Stats(
                running=self.streams.num_open,
                requests_total=self.streams.opened_total,
                output_tokens_total=self.streams.tokens_total,
                steps_total=self._steps_total,
                rss_bytes=rss_bytes(),
            )
        )

    def _on_batch(self, scheduler: int, batch: TokenBatch) -> None:
        self._steps_total += 1
        outcome = self.streams.apply(scheduler, batch)
        if outcome.stops:
            self._links.answer(scheduler, Stop(outcome.stops))
        for gateway, deltas in outcome.deltas.items():
            if not self._links.send(gateway, TextBatch(deltas, batch.stamp_s)):
                for hit in {scheduler, *self.streams.drop_peer(gateway)}:
                    self._links.answer(hit, PathLost(gateway))

    def _learn(self, member: Member) -> None:
        """Takes the model's vocabulary size: its embedding may be padded with ids that have no text."""
        card = member.card
        if card is not None and (not self._names or self._names.intersection(card.names)):
            self._table.raise_vocab_size(card.vocab_size)
