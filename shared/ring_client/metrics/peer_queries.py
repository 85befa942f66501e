"""Sends one frame to several members and waits, for a limited time, until all have answered."""

import asyncio
from collections.abc import Iterable

from blockyard.shared.messages import Member, Scrape, StatsRequest
from blockyard.shared.ring_client.ring_links import RingLinks


class PeerQueries:
    """The queries of one client. The frames' request ids tell them apart."""

    def __init__(self, links: RingLinks) -> None:
        self._links = links
        # request id -> members that have not answered yet, and the event that ends the wait
        self._pending: dict[str, tuple[set[int], asyncio.Event]] = {}

    async def ask(self, members: Iterable[Member], frame: Scrape | StatsRequest, timeout_s: float) -> set[int]:
        """Returns the incarnations that received the frame and did not answer in time."""
        waiting = {m.incarnation for m in members if self._links.send(m.incarnation, frame)}
        if not waiting:
            return waiting
        all_answered = asyncio.Event()
        self._pending[frame.request_id] = waiting, all_answered
        try:
            async with asyncio.timeout(timeout_s):
                await all_answered.wait()
        except TimeoutError:
            pass
        finally:
            del self._pending[frame.request_id]
        return waiting

    def answered(self, peer: int, request_id: str) -> None:
        """Called for every answer, also a late one."""
        if request_id in self._pending:
            waiting, all_answered = self._pending[request_id]
            waiting.discard(peer)
            if not waiting:
                all_answered.set()
