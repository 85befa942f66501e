"""Routes frames and membership events to the parts of a ring client."""

import asyncio
import math
import time
from collections.abc import Callable

from blockyard.shared.bus.member_list import Changed, Event, Gone, Joined
from blockyard.shared.messages import (
    Accepted,
    Controlled,
    Detokenized,
    GatewayIn,
    Member,
    PathLost,
    QueueCapacityChanged,
    Refused,
    Role,
    StatsResponse,
    TextBatch,
    TextRejected,
    TextsTokenized,
    Tokenized,
    TokenizerDescription,
    VectorBatch,
)
from blockyard.shared.ring_client.controls import ControlClient
from blockyard.shared.ring_client.fanout import Fanout
from blockyard.shared.ring_client.journal import Journal
from blockyard.shared.ring_client.metrics.member_counts import MemberCounts
from blockyard.shared.ring_client.metrics.meters import Meters
from blockyard.shared.ring_client.pooling.pooling_client import PoolingClient
from blockyard.shared.ring_client.recovery.dispatch import Dispatch
from blockyard.shared.ring_client.recovery.hold import HOLD_S
from blockyard.shared.ring_client.recovery.recovery import Recovery
from blockyard.shared.ring_client.ring_links import RingLinks
from blockyard.shared.ring_client.schedulers import Schedulers
from blockyard.shared.ring_client.tokenizer_client import TokenizerClient
from blockyard.shared.ring_client.tokenizer_jobs import MAX_WAITING

TICK_S = 0.1
TICKS_A_ROUND = 5  # retries between two rounds of the slower checks


class RingClient:
    """All parts of one client. `handle` never waits."""

    def __init__(
        self,
        links: RingLinks,
        served_model_names: list[str],
        stall_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        hold_s: float = HOLD_S,
        check_wait_s: float = math.inf,
        max_waiting_texts: int = MAX_WAITING,
    ) -> None:
        """`hold_s`: how long a new request is held while its model's scheduler restarts. `check_wait_s`: how long its
        grammar waits for the checks of others. `max_waiting_texts`: at a tokenizer."""
        self._stall_timeout_s, self.clock = stall_timeout_s, clock
        self.meters = Meters(served_model_names[0] if served_model_names else "")
        self.journal = Journal()
        self.schedulers = Schedulers(served_model_names)
        self.tokenizer_client = TokenizerClient(links, check_wait_s, max_waiting_texts)
        self.controls, self._links = ControlClient(links), links
        self.counts = MemberCounts(links)
        self.dispatch = Dispatch(links, self.journal, self.schedulers, self.meters, hold_s)
        self._recovery = Recovery(links, self.journal, self.schedulers, self.dispatch, stall_timeout_s)
        self.pooling = PoolingClient(self.tokenizer_client, self.schedulers, self.dispatch, self.meters, clock)
        self._fanout = Fanout(links, self.journal, self.dispatch, self._recovery, self.meters)

    def handle(self, peer: int, event: Event | GatewayIn) -> None:
        match event:
            case TextBatch():
                self._fanout.text(event, self.clock())
            case VectorBatch():
                self._fanout.vectors(event, self.clock())
            case Tokenized() | TextsTokenized() | Detokenized() | TokenizerDescription() | TextRejected():
                self.tokenizer_client.answered(peer, event)
            case Accepted():
                self._recovery.accepted(peer, event, self.clock())
            case Refused():
                self._recovery.refused(peer, event, self.clock())
            case PathLost():
                self._recovery.path_lost(peer, event.member, self.clock())
            case QueueCapacityChanged():
                self.schedulers.heard(peer, event.capacity, self.clock())
            case Controlled():
                self._controlled(peer, event)
            case StatsResponse():
                self.counts.on_response(peer, event)
            case Joined() | Changed():
                self._changed(event.member)
            case Gone():
                self._gone(event.member)

    async def keep_time(self, count: Callable[[], None]) -> None:
        """Runs timeouts and retries for ever. Calls `count` about twice a second to publish counters."""
        while True:
            self.schedulers.tick(self.clock())
            self._restore_adapters()
            self._recovery.tick(self.clock())
            self.tokenizer_client.tick(self.clock(), self._stall_timeout_s)
            count()
            for _ in range(TICKS_A_ROUND):
                self.dispatch.retry(self.clock())
                await asyncio.sleep(TICK_S)

    def num_open(self) -> int:
        """Returns the number of choices that have not ended."""
        return sum(entry.num_open for entry in self.journal.entries.values())

    def _controlled(self, peer: int, answer: Controlled) -> None:
        self.schedulers.lost_adapters.on_answer(peer, answer)
        if answer.adapters is not None:
            self.schedulers.on_adapters(peer, answer.adapters, answer.unloaded)
        self._restore_adapters()
        self.controls.answered(peer, answer)

    def _changed(self, member: Member) -> None:
        self.schedulers.changed(member)
        self._restore_adapters()
        self.tokenizer_client.changed(member)
        self._recovery.changed(member, self.clock())
        if member.role is Role.SCHEDULER and (cards := self.schedulers.cards()):
            self.meters.serves(cards[0])

    def _restore_adapters(self) -> None:
        for scheduler, command in self.schedulers.lost_adapters.take_commands():
            self._links.send(scheduler, command)

    def _gone(self, member: Member) -> None:
        self.schedulers.gone(member, self.clock())
        self.tokenizer_client.gone(member)
        self.controls.gone(member)
        self.counts.gone(member)
        self._recovery.gone(member, self.clock())
