"""Adapters of a leader: it tells followers which ones to read, and to place, before it does so itself."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from blockyard.services.gpu_worker.interfaces import LoadedAdapter
from blockyard.services.gpu_worker.lora.worker_adapters import WorkerAdapters
from blockyard.services.gpu_worker.parallel.commands import (
    AdapterRead,
    ForgetAdapter,
    ForgetAdapters,
    PlaceAdapters,
    ReadAdapter,
)
from blockyard.services.gpu_worker.parallel.rank_group import LEADER
from blockyard.services.gpu_worker.parallel.team import SendCommand
from blockyard.shared.messages import AdapterPlaced

JOB_BITS = 63


class AdapterFollowers(Protocol):
    """The followers of a leader. Implemented by `ranks.LeaderTeam`."""

    @property
    def followers(self) -> Sequence[int]:
        """Their ranks."""

    def take_adapter_answers(self) -> list[tuple[int, AdapterRead]]:
        """Returns what followers have read, with their ranks. Does not wait. Raises RankLostError."""


@dataclass(frozen=True, slots=True)
class _Reading:
    """An adapter that not all ranks have read."""

    adapter: int
    by_rank: dict[int, LoadedAdapter] = field(default_factory=dict)

    def joined(self) -> LoadedAdapter:
        """What all ranks together say: one that cannot read it fails them all."""
        found = [self.by_rank[rank] for rank in sorted(self.by_rank)]
        of_leader = self.by_rank[LEADER]
        for rank, one in sorted(self.by_rank.items()):
            if one.error:
                error = one.error if one is of_leader else f"rank {rank}: {one.error}"
                return LoadedAdapter(self.adapter, error=error, status=one.status)
            if one.digest != of_leader.digest:
                return LoadedAdapter(self.adapter, error="the folder has changed while the ranks were reading it")
        return replace(of_leader, size_bytes=sum(one.size_bytes for one in found))


class LeaderAdapters:
    """Implements `AdapterHost`: an adapter is loaded once all ranks have it."""

    def __init__(self, own: WorkerAdapters, send: SendCommand, followers: AdapterFollowers) -> None:
        """own: of the leader's share. send: to the followers."""
        self._own, self._send, self._followers = own, send, followers
        self._num_ranks = 1 + len(followers.followers)
        self._reading: dict[int, _Reading] = {}  # by job

    @property
    def is_loading(self) -> bool:
        return bool(self._reading)

    def load(self, adapter: int, path: str) -> None:
        job = secrets.randbits(JOB_BITS)
        self._reading[job] = _Reading(adapter)
        self._send(ReadAdapter(job, adapter, path))
        self._own.load(adapter, path, job)

    def drop(self, adapter: int) -> None:
        self._send(ForgetAdapter(adapter))
        self._own.drop(adapter)

    def reset(self) -> None:
        self._reading.clear()
        self._send(ForgetAdapters())
        self._own.reset()

    def poll(self, *, is_idle: bool = False) -> list[LoadedAdapter]:
        for loaded in self._own.poll(is_idle=is_idle):
            self._reading[loaded.job].by_rank[LEADER] = loaded
        for rank, answer in self._followers.take_adapter_answers():
            if (reading := self._reading.get(answer.job)) is not None:  # else it was asked before a reset
                columns = (reading.adapter, answer.digest, answer.size_bytes, answer.error)
                reading.by_rank[rank] = LoadedAdapter(*columns, status=answer.status)
        done: list[LoadedAdapter] = []
        for job in [job for job, one in self._reading.items() if len(one.by_rank) == self._num_ranks]:
            loaded = self._reading.pop(job).joined()
            if loaded.error:
                self.drop(loaded.adapter)
            done.append(loaded)
        return done

    def place(self, placed: Sequence[AdapterPlaced]) -> None:
        """Call it at the launch of the plan that places them."""
        self._send(PlaceAdapters(list(placed)))
        self._own.place(placed)
