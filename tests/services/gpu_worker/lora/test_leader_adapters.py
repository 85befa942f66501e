"""What a leader makes of the answers of its followers."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from blockyard.services.gpu_worker.interfaces import LoadedAdapter
from blockyard.services.gpu_worker.lora.ranks.leader_adapters import LeaderAdapters
from blockyard.services.gpu_worker.lora.worker_adapters import WorkerAdapters
from blockyard.services.gpu_worker.parallel.commands import (
    AdapterRead,
    Followers,
    ForgetAdapter,
    ForgetAdapters,
    PlaceAdapters,
    ReadAdapter,
)
from blockyard.shared.messages import AdapterPlaced
from blockyard.shared.messages.base import Frame

SAME = b"x" * 16


class Ranks:
    """Two followers and the leader's own adapters, which answer when a test says so."""

    def __init__(self) -> None:
        self.sent, self.answers, self.own = list[Frame](), list[tuple[int, AdapterRead]](), list[LoadedAdapter]()
        self.dropped, self.followers = list[int](), [1, 2]
        self.placed: list[AdapterPlaced] = []
        own = SimpleNamespace(
            load=lambda *given: None,
            drop=self.dropped.append,
            reset=self.own.clear,
            place=self.placed.extend,
            poll=lambda is_idle: [self.own.pop() for _ in list(self.own)],
        )
        self.adapters = LeaderAdapters(cast(WorkerAdapters, own), self.send, cast(Any, self))

    def send(self, frame: Frame, to: Followers = Followers.ALL) -> None:
        self.sent.append(frame)

    def take_adapter_answers(self) -> Sequence[tuple[int, AdapterRead]]:
        found, self.answers = self.answers, []
        return found

    def load(self) -> int:
        self.adapters.load(5, "/a")
        last = self.sent[-1]
        assert isinstance(last, ReadAdapter)
        return last.job


def test_an_adapter_is_loaded_once_all_ranks_have_it() -> None:
    ranks = Ranks()
    job = ranks.load()
    ranks.answers = [(1, AdapterRead(job, SAME, 10)), (2, AdapterRead(job + 1, SAME, 10))]
    assert not ranks.adapters.poll() and ranks.adapters.is_loading
    ranks.own.append(LoadedAdapter(5, SAME, 12, notes=["said"], job=job))
    assert not ranks.adapters.poll()
    ranks.answers = [(2, AdapterRead(job, SAME, 10))]
    assert ranks.adapters.poll() == [LoadedAdapter(5, SAME, 32, notes=["said"], job=job)]
    assert not ranks.adapters.is_loading and not ranks.dropped
    ranks.adapters.place([AdapterPlaced(1, 5)])
    assert ranks.sent[-1] == PlaceAdapters([AdapterPlaced(1, 5)]) and ranks.placed == [AdapterPlaced(1, 5)]


@pytest.mark.parametrize(
    ("digest", "error", "own_error", "said"),
    [
        (b"", "no memory", "", "rank 2: no memory"),
        (b"", "no folder", "no folder", "no folder"),
        (b"y" * 16, "", "", "the folder has changed while the ranks were reading it"),
    ],
)
def test_one_rank_fails_the_load_for_all(digest: bytes, error: str, own_error: str, said: str) -> None:
    """Once all have answered, so that none has it later."""
    ranks = Ranks()
    job = ranks.load()
    ranks.answers = [(2, AdapterRead(job, digest, 10, error))]
    ranks.own.append(LoadedAdapter(5, b"" if own_error else SAME, 12, own_error, job=job))
    assert not ranks.adapters.poll()
    ranks.answers = [(1, AdapterRead(job, SAME, 10))]
    [loaded] = ranks.adapters.poll()
    assert (loaded.adapter, loaded.error) == (5, said)
    assert ranks.sent[-1] == ForgetAdapter(5) and ranks.dropped == [5]


def test_answers_to_what_was_asked_before_a_reset_are_dropped() -> None:
    ranks = Ranks()
    before = ranks.load()
    ranks.adapters.reset()
    assert ranks.sent[-1] == ForgetAdapters() and not ranks.adapters.is_loading
    job = ranks.load()
    ranks.own.append(LoadedAdapter(5, SAME, job=job))
    ranks.answers = [(rank, AdapterRead(before, b"old")) for rank in (1, 2)]
    assert not ranks.adapters.poll()
    ranks.answers = [(rank, AdapterRead(job, SAME)) for rank in (1, 2)]
    assert [one.digest for one in ranks.adapters.poll()] == [SAME]
