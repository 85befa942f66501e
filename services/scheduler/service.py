"""The scheduler's loop, a plain thread: receive, step, send."""

import gc
import threading
import time
from typing import Protocol

import msgspec

from blockyard.services.scheduler.core import Scheduler
from blockyard.services.scheduler.outbox import LinkSide, Outgoing
from blockyard.services.scheduler.report import StatsLog
from blockyard.shared.bus.member_list import Changed, Event, Gone, Joined
from blockyard.shared.messages import Frame, KVRole, ModelCard, SchedulerIn, Stats, StatsRequest, StatsResponse
from blockyard.shared.process.service_main import rss_bytes

TICK_S = 0.25  # longest wait for a frame; reports and SIGTERM may be this late
STATS_S = 0.5
COLLECT_S = 10.0  # between garbage collections, which run only while no plan is in flight


class SchedulerLinks(Protocol):
    def poll(self, timeout_s: float) -> list[tuple[int, Event | SchedulerIn]]: ...
    def send(self, to: int, frame: Frame) -> bool: ...
    def answer(self, to: int, frame: Frame) -> bool: ...
    def update(
        self, *, card: ModelCard | None = ..., ready: bool = ..., phase: str = ..., notes: list[str] = ...
    ) -> None: ...
    def count(self, stats: Stats) -> None: ...


class Service:
    def __init__(self, links: SchedulerLinks, core: Scheduler, report: StatsLog) -> None:
        self._links, self._core, self._report = links, core, report
        self._card: ModelCard | None = None
        self._phase = ""
        self._roles: frozenset[KVRole] = frozenset()
        self._stats_at = 0.0
        self._collected_at = time.monotonic()

    def run(self, stopped: threading.Event) -> None:
        """Serves until `stopped` is set. Raises FencedError when another scheduler has taken over."""
        gc.collect()
        gc.freeze()
        gc.disable()  # a full collection would delay a step by milliseconds
        while not stopped.is_set():
            for peer, event in self._links.poll(self._timeout(time.monotonic())):
                self.on_event(peer, event, time.monotonic())
            self.step(time.monotonic())

    def on_event(self, peer: int, event: Event | SchedulerIn, now: float) -> None:
        match event:
            case Joined(member) | Changed(member):
                self._core.on_member(member, now)
            case Gone():
                self._core.on_member_lost(peer)
            case StatsRequest(request_id):
                self._links.answer(peer, StatsResponse(request_id, self._stats()))
            case _:
                self._core.on_message(peer, event, now)

    def step(self, now: float) -> None:
        """One step of the core, and another one if a frame could not be sent: that member is lost."""
        outgoing = self._core.step(now)
        while outgoing:
            lost = {o.to for o in outgoing if not self._send(o) and o.side is LinkSide.OURS}
            for incarnation in lost:
                self._core.on_member_lost(incarnation)
            outgoing = self._core.step(now) if lost else []
        self._publish(now)

    def _send(self, outgoing: Outgoing) -> bool:
        if outgoing.side is LinkSide.OURS:
            return self._links.send(outgoing.to, outgoing.frame)
        return self._links.answer(outgoing.to, outgoing.frame)

    def _publish(self, now: float) -> None:
        core = self._core
        if core.card is not self._card or core.phase != self._phase or core.roles != self._roles:
            self._card, self._phase, self._roles = core.card, core.phase, core.roles
            ready = core.card is not None  # stays True while a worker is away: requests wait
            self._links.update(card=core.card, ready=ready, phase=core.phase, notes=core.notes)
        if now >= self._stats_at:
            self._stats_at = now + STATS_S
            stats = self._stats()
            self._links.count(stats)
            self._report.warn(stats)
            if self._report.due(now):
                self._report.log(stats, now)
            if core.idle and now - self._collected_at > COLLECT_S:
                self._collected_at = now
                gc.collect()

    def _stats(self) -> Stats:
        return msgspec.structs.replace(self._core.stats(), rss_bytes=rss_bytes())

    def _timeout(self, now: float) -> float:
        wake_at = self._core.wake_at()
        return TICK_S if wake_at is None else min(TICK_S, max(0.0, wake_at - now))
