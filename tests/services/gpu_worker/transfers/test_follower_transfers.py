"""What a leader tells its followers of sends, and when a follower moves the blocks."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake_links import FakeLinks
from kv_peers import SMALL
from kv_workers import GEOMETRY, KVWorker, RawMemory, bus_at, plan_of, send_to

from blockyard.services.gpu_worker.interfaces import StoredLayers
from blockyard.services.gpu_worker.parallel.commands import (
    CloseTransfers,
    Followers,
    OpenTransfers,
    SendBlocks,
    SharePlaces,
    TransferAnswer,
    TransferEvents,
    TransfersOpened,
)
from blockyard.services.gpu_worker.transfers.follower_transfers import CALM_S, FollowerTransfers
from blockyard.services.gpu_worker.transfers.worker_transfers import WorkerTransfers
from blockyard.services.kv_transfer.routes import RankPlace
from blockyard.shared.bus.poller import Poller, Readable
from blockyard.shared.config.services.process import ProcessConfig
from blockyard.shared.config.services.worker import KVTransferConfig, WorkerConfig
from blockyard.shared.messages import Member, Role
from blockyard.shared.messages.base import Frame

A, B = 0xA, 0xB


class Pipe:
    """A `FrameEnd` of a follower: a command comes once `is_due` says so."""

    sources: Sequence[Readable] = ()

    def __init__(self) -> None:
        self.answers: list[msgspec.Struct] = []
        self.is_due: Callable[[], bool] = lambda: True

    @property
    def is_readable(self) -> bool:
        return self.is_due()

    def send(self, frame: msgspec.Struct) -> None:
        self.answers.append(frame)


class FollowerRank:
    """A follower that is the only rank, with the receiver of what it sends."""

    def __init__(self, folder: Path) -> None:
        self.pipe, self.memory, self.receiver = Pipe(), RawMemory(SMALL, 20), KVWorker(bus_at(folder), B, SMALL)
        self.memory.fill_random()
        self.transfers = FollowerTransfers(config_at(folder), 0, self.pipe)  # type: ignore[arg-type]
        self.transfers.do(OpenTransfers(A, 1), self.memory)
        (opened,) = self.pipe.answers
        assert isinstance(opened, TransfersOpened)
        self.transfers.do(SharePlaces([opened.place]), self.memory)

    def send(self, number: int, source: int, target: int, stored: Sequence[StoredLayers] = ()) -> None:
        self.receiver.receive(number, A, [target])
        send = send_to(self.receiver.geometry, B, number, [source], [target])
        self.transfers.do(SendBlocks(send, is_running=bool(stored)), self.memory, stored)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """No command comes until then."""

        def is_due() -> bool:
            self.receiver.turn()
            return condition()

        self.pipe.is_due = is_due
        self.transfers.wait_for_command(lambda: False)

    def has(self, layer: int, target: int, source: int) -> bool:
        return bool((self.receiver.memory.blocks[layer, target] == self.memory.blocks[layer, source]).all())


@pytest.fixture
def follower(tmp_path: Path) -> Iterator[FollowerRank]:
    one = FollowerRank(tmp_path)
    yield one
    one.transfers.do(CloseTransfers(), one.memory)
    one.receiver.transfers.close()


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Timeouts of a follower's waits."""
    seen: list[float] = []
    wait = Poller.wait

    def counted(self: Poller, timeout_s: float) -> None:
        seen.append(timeout_s)
        wait(self, min(timeout_s, 0.001))

    monkeypatch.setattr(Poller, "wait", counted)
    return seen


def config_at(folder: Path, **changes: Any) -> WorkerConfig:
    process = ProcessConfig(name="worker", bus=bus_at(folder))
    return WorkerConfig(process=process, model_path="m", kv_transfer=KVTransferConfig(), **changes)


def test_a_copy_begins_before_a_follower_waits(follower: FollowerRank, waits: list[float]) -> None:
    """No descriptor wakes it up for what a command begins."""
    follower.send(1, source=3, target=5)
    follower.wait_until(lambda: 1 in follower.receiver.ended)
    follower.receiver.receive(2, A, [7])
    follower.wait_until(lambda: len(waits) > 50)  # the link and the permission to write are there
    waits.clear()
    follower.send(2, source=4, target=7)
    follower.wait_until(lambda: 2 in follower.receiver.ended)
    assert waits[0] == CALM_S
    assert all(follower.has(layer, 7, 4) for layer in range(SMALL.num_layers))
    (ends,) = [it for it in follower.pipe.answers if isinstance(it, TransferEvents)][-1:]
    assert [sent.number for sent in ends.sent] == [2]


def test_layers_leave_as_the_step_of_a_follower_stores_them(follower: FollowerRank, waits: list[float]) -> None:
    stored: set[int] = set()
    groups = [StoredLayers(range(i, i + 1), lambda i=i: i in stored) for i in range(SMALL.num_layers)]
    follower.send(1, source=3, target=5, stored=groups)
    for layer in range(SMALL.num_layers):
        waits.clear()
        follower.wait_until(lambda: len(waits) > 200)
        assert [follower.has(i, 5, 3) for i in range(SMALL.num_layers)] == [i < layer for i in range(SMALL.num_layers)]
        assert waits[-1] == 0, "no event tells that layers are stored"
        stored.add(layer)
        follower.wait_until(lambda i=layer: follower.has(i, 5, 3))
    follower.wait_until(lambda: 1 in follower.receiver.ended)
    assert follower.receiver.landed[1] == [5]


def test_a_send_amid_a_step_needs_its_layers(follower: FollowerRank) -> None:
    send = send_to(follower.receiver.geometry, B, 1, [3], [5])
    with pytest.raises(AssertionError, match="has not recorded its layers"):
        follower.transfers.do(SendBlocks(send, is_running=True), follower.memory)


class ToldFollowers:
    """The followers of a leader, as `TransferFollowers`: one that does nothing."""

    answers: Sequence[Readable] = ()
    followers: Sequence[int] = (1,)

    def __init__(self) -> None:
        self.commands: list[Frame] = []
        self._place: TransferAnswer = TransfersOpened(RankPlace("ipc:///unused", 1, SMALL.whole))

    def send(self, frame: Frame, to: Followers = Followers.ALL) -> None:
        self.commands.append(frame)

    def take_answers(self) -> list[tuple[int, TransferAnswer]]:
        return []

    def wait_answer(self, rank: int) -> TransferAnswer:
        return self._place


@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_leader_tells_followers_of_a_send_once(tmp_path: Path, num_stages: int) -> None:
    """While the step runs, or with pipeline stages when it is done: the leader knows its own layers alone."""
    told, memory = ToldFollowers(), RawMemory(SMALL, 20)
    links = FakeLinks(Member("worker", Role.GPU_WORKER, A, "ipc:///unused"))
    config = config_at(tmp_path, tensor_parallel_size=2, pipeline_parallel_size=num_stages)
    transfers = WorkerTransfers(config, links, lambda: memory, told)
    told.commands.clear()
    send = send_to(transfers.describe(GEOMETRY), B, 1, [3], [5])
    groups = [StoredLayers(range(i, i + 1), lambda: False) for i in range(SMALL.num_layers)]
    transfers.on_launched(plan_of(send), groups)
    assert told.commands == ([SendBlocks(send, is_running=True)] if num_stages == 1 else [])
    transfers.on_plan_done(plan_of(send))
    assert told.commands == [SendBlocks(send, is_running=num_stages == 1)]
    assert transfers.num_open == 1
    transfers.close()
