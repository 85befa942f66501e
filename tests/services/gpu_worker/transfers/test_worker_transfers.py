"""Transfers between two workers, over real links: in one process, with each side killed, and around sleep."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from kv_peers import LARGE, SMALL, needs_nixl
from kv_workers import GEOMETRY, NUM_BLOCKS, KVWorker, bus_at, plan_of, send_to, until, worker_process

from blockyard.services.gpu_worker.interfaces import StoredLayers
from blockyard.services.kv_transfer import sender_link, sender_links
from blockyard.services.kv_transfer.layout import LayerRun, as_text
from blockyard.services.kv_transfer.link_sockets import transfer_sockets
from blockyard.services.kv_transfer.protocol.frames import Stopped
from blockyard.services.kv_transfer.routes import decode_places
from blockyard.services.kv_transfer.sender_link import SenderLink
from blockyard.shared.bus.poller import Poller
from blockyard.shared.errors import ConfigError
from blockyard.shared.messages import KVAbort, KVLanded, KVReceive, KVRole, KVSendEnded, NamedCount, Stats

A, B = 0xA, 0xB
CONNECTORS = ["shm", "tcp", pytest.param("nixl", marks=needs_nixl)]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., KVWorker]]:
    made: list[KVWorker] = []

    def one(*arguments: Any, **settings: Any) -> KVWorker:
        made.append(KVWorker(bus_at(tmp_path), *arguments, **settings))
        return made[-1]

    yield one
    for worker in made:
        worker.transfers.close()
        assert worker.links.watched == []


@pytest.fixture
def workers(make: Callable[..., KVWorker]) -> tuple[KVWorker, KVWorker]:
    """A sends, B receives."""
    pair = make(A, SMALL, 20), make(B, SMALL, 30)
    pair[0].memory.fill_random()
    return pair


def holds(worker: KVWorker, blocks: list[int], other: KVWorker, sources: list[int]) -> bool:
    return bool((worker.memory.blocks[:, blocks] == other.memory.blocks[:, sources]).all())


def test_blocks_of_several_plans_land_and_both_ends_answer_once(workers: tuple[KVWorker, KVWorker]) -> None:
    a, b = workers
    b.receive(1, A, [5, 9, 7, 2])
    assert b.memory.without_kv == {5, 9, 7, 2} and b.transfers.open_transfers() == {1: [5, 9, 7, 2]}
    a.send(send_to(b.geometry, B, 1, [3, 4], [5, 9], is_last=False))
    until(lambda: sorted(b.landed.get(1, [])) == [5, 9], a, b)
    assert not a.ended and not b.ended and a.transfers.open_transfers() == {1: [3, 4]}
    assert b.memory.without_kv == {7, 2} and a.memory.in_transfer == {1: {3, 4}}
    a.send(send_to(b.geometry, B, 1, [8, 0], [7, 2]))
    until(lambda: 1 in a.ended and 1 in b.ended, a, b)
    assert sorted(b.landed[1]) == [2, 5, 7, 9] and b.failed[1] == []
    assert a.ended[1] == [KVSendEnded(1, True)]
    assert holds(b, [5, 9, 7, 2], a, [3, 4, 8, 0])
    assert not a.memory.in_transfer and not b.memory.in_transfer and not b.memory.without_kv
    assert a.transfers.num_open == b.transfers.num_open == 0 and b.transfers.open_transfers() == {}


def test_layers_leave_one_after_another_while_the_step_runs(workers: tuple[KVWorker, KVWorker]) -> None:
    a, b = workers
    b.receive(1, A, [5, 9])
    stored: set[int] = set()  # layers
    groups = [StoredLayers(range(i, i + 1), lambda i=i: i in stored) for i in range(SMALL.num_layers)]
    plan = plan_of(send_to(b.geometry, B, 1, [3, 4], [5, 9]))
    a.transfers.on_launched(plan, groups)
    for layer in range(SMALL.num_layers):
        for _ in range(20):
            a.turn()
            b.turn()
        until(lambda: a.transfers.busy, a, b)  # the rest waits
        moved = [bool((b.memory.blocks[i, [5, 9]] == a.memory.blocks[i, [3, 4]]).all()) for i in range(3)]
        assert moved == [i < layer for i in range(3)] and not b.landed
        stored.add(layer)
        until(lambda i=layer: bool((b.memory.blocks[i, [5, 9]] == a.memory.blocks[i, [3, 4]]).all()), a, b)
    until(lambda: 1 in a.ended and 1 in b.ended, a, b)
    assert sorted(b.landed[1]) == [5, 9] and a.is_complete(1)
    a.transfers.on_plan_done(plan)  # it sends nothing again
    for _ in range(20):
        a.turn()
        b.turn()
    assert a.is_complete(1) and len(b.landed[1]) == 2


def test_an_abort_before_layers_are_stored_ends_a_send(workers: tuple[KVWorker, KVWorker]) -> None:
    a, b = workers
    b.receive(1, A, [5])
    plan = plan_of(send_to(b.geometry, B, 1, [3], [5]))
    a.transfers.on_launched(plan, [StoredLayers(range(SMALL.num_layers), lambda: False)])
    for _ in range(20):
        a.turn()
        b.turn()
    a.transfers.abort(KVAbort(1, True))
    until(lambda: 1 in a.ended and 1 in b.ended, a, b)
    assert not a.is_complete(1) and not b.landed.get(1) and not b.memory.blocks[:, 5].any()
    a.transfers.on_plan_done(plan)
    assert a.transfers.num_open == 0


def test_one_link_carries_all_transfers_of_a_pair(workers: tuple[KVWorker, KVWorker]) -> None:
    a, b = workers
    for number in range(6):
        b.receive(number, A, [2 * number, 2 * number + 1])
        a.send(send_to(b.geometry, B, number, [number, 19 - number], [2 * number, 2 * number + 1]))
    until(lambda: len(a.ended) == len(b.ended) == 6, a, b)
    assert all(holds(b, [2 * n, 2 * n + 1], a, [n, 19 - n]) for n in range(6))
    assert len(a.links.watched) == 5, "socket and monitor of a link and of the receiver, and the copy thread"


@pytest.mark.parametrize("by", ["source", "target"])
def test_an_aborted_transfer_ends_on_both_sides(workers: tuple[KVWorker, KVWorker], by: str) -> None:
    a, b = workers
    b.receive(1, A, [5, 6])
    a.send(send_to(b.geometry, B, 1, [3], [5], is_last=False))
    until(lambda: b.landed.get(1) == [5], a, b)
    if by == "source":
        a.transfers.abort(KVAbort(1, is_source=True))
    else:
        b.transfers.abort(KVAbort(1))
    until(lambda: 1 in a.ended and 1 in b.ended, a, b)
    assert a.ended[1] == [KVSendEnded(1, False)] and b.ended[1] == [KVLanded(1, [], [], True)]
    assert b.memory.without_kv == {6}
    a.send(send_to(b.geometry, B, 1, [4], [6]))  # its plan was queued before the abort
    until(lambda: len(a.ended[1]) == 2, a, b)
    assert a.transfers.num_open == 0 and not b.memory.blocks[:, 6].any() and b.memory.without_kv == {6}


def test_an_abort_of_a_transfer_that_is_not_open_is_answered_each_time(workers: tuple[KVWorker, KVWorker]) -> None:
    a, b = workers
    for count in (1, 2):
        a.transfers.abort(KVAbort(7, is_source=True))
        a.transfers.abort(KVAbort(8))
        a.turn()
        assert a.ended == {7: [KVSendEnded(7, False)] * count, 8: [KVLanded(8, [], [], True)] * count}
    b.receive(7, A, [5])
    a.send(send_to(b.geometry, B, 7, [3], [5]))  # the plan was queued when its transfer was aborted
    for _ in range(20):
        a.turn()
        b.turn()
    assert len(a.ended[7]) == 3 and a.transfers.num_open == 0 and 7 not in b.ended
    b.transfers.abort(KVAbort(7))
    until(lambda: 7 in b.ended, a, b)
    b.receive(2, A, [4])
    a.send(send_to(b.geometry, B, 2, [3], [4]))
    until(lambda: 2 in a.ended and 2 in b.ended, a, b)
    a.transfers.abort(KVAbort(2, is_source=True))
    a.turn()
    assert a.ended[2] == [KVSendEnded(2, True)] * 2, "it was complete"


def test_frames_that_cannot_be_served_are_answered_as_ended(workers: tuple[KVWorker, KVWorker]) -> None:
    a, b = workers
    b.receive(1, A, [5, 5])
    b.receive(2, A, [30])
    b.turn()
    assert b.ended == {n: [KVLanded(n, [], [], True)] for n in (1, 2)} and not b.memory.without_kv
    nowhere = msgspec.structs.replace(b.geometry, kv_endpoint=b"pigeon://loft")
    a.send(send_to(nowhere, B, 3, [1], [2]))
    a.send(send_to(b.geometry, B, 4, [20], [2]))
    a.turn()
    assert a.ended == {n: [KVSendEnded(n, False)] for n in (3, 4)} and a.transfers.num_open == 0
    b.receive(6, A, [4])
    b.receive(6, A, [4])  # the same frame again
    a.send(send_to(b.geometry, B, 6, [1], [4]))
    until(lambda: 6 in a.ended and 6 in b.ended, a, b)
    assert len(b.ended[6]) == 1 and b.landed[6] == [4]


def test_an_unexpected_error_ends_a_send_and_not_the_worker(
    workers: tuple[KVWorker, KVWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("CUDA out of memory")

    a, b = workers
    b.receive(1, A, [4])
    with monkeypatch.context() as patch:
        patch.setattr(sender_link, "make_copier", fails)
        a.send(send_to(b.geometry, B, 1, [1], [4]))
    a.turn()
    assert a.ended == {1: [KVSendEnded(1, False)]} and a.transfers.num_open == 0
    b.receive(2, A, [5])
    a.send(send_to(b.geometry, B, 2, [1], [5]))
    until(lambda: 2 in b.ended, a, b)
    assert b.landed[2] == [5]


def test_workers_with_other_layouts_do_not_exchange_blocks(make: Callable[..., KVWorker]) -> None:
    other = msgspec.structs.replace(SMALL, runs=(LayerRun(3, 2, 16),))
    a, b = make(A, other), make(B, SMALL)
    assert a.geometry.kv_layout != b.geometry.kv_layout
    assert b.geometry.kv_layout == make(A, SMALL, 7).geometry.kv_layout
    unsummed = make(A, SMALL, checksums=False)
    assert unsummed.geometry.kv_layout != b.geometry.kv_layout
    b.receive(1, A, [5])
    a.send(send_to(b.geometry, B, 1, [3], [5]))
    until(lambda: 1 in a.ended, a, b)
    assert a.ended[1] == [KVSendEnded(1, False)] and 1 not in b.ended, "the scheduler aborts it"
    b.transfers.on_gone(A)
    until(lambda: 1 in b.ended, a, b)


def test_geometry_names_role_layout_memory_and_endpoint(make: Callable[..., KVWorker]) -> None:
    a = make(A, SMALL, role=KVRole.PREFILL)
    told = a.geometry
    assert (told.kv_role, told.kv_generation) == (KVRole.PREFILL, 1)
    assert told.kv_layout == as_text(msgspec.structs.replace(SMALL, scope="m|{}|auto|")), "readable, for the log"
    [place] = decode_places(told.kv_endpoint)
    assert place.endpoint.startswith("ipc://") and place.generation == 1
    rest = msgspec.structs.replace(told, kv_role=KVRole.BOTH, kv_generation=0, kv_layout="", kv_endpoint=b"")
    assert rest == GEOMETRY


def test_without_scales_a_worker_exchanges_blocks_with_none_until_it_has_them(make: Callable[..., KVWorker]) -> None:
    a = make(A, None)
    assert (a.geometry.kv_layout, a.geometry.kv_endpoint) == ("", b"") and a.links.watched == []
    a.receive(1, B, [3])
    a.send(send_to(GEOMETRY, B, 2, [3], [4]))
    a.turn()
    assert a.ended == {1: [KVLanded(1, [], [], True)], 2: [KVSendEnded(2, False)]}
    a.memory.layout = msgspec.structs.replace(LARGE, scales=b"s")
    a.transfers.open()
    assert a.geometry.kv_layout and a.geometry.kv_endpoint


@pytest.mark.parametrize(
    ("connector", "line"),
    [
        ("cuda_ipc", "KV connector cuda_ipc: the KV memory of this worker is on a CPU"),
        ("pigeon", "unknown KV connector 'pigeon': use one of auto, cuda_ipc, shm, tcp, nixl"),
    ],
)
def test_a_connector_that_cannot_be_used_is_an_error_at_the_start(
    make: Callable[..., KVWorker], connector: str, line: str
) -> None:
    with pytest.raises(ConfigError) as error:
        make(A, SMALL, connector=connector)
    assert str(error.value) == line


def test_counters_outlive_links_and_memory(
    workers: tuple[KVWorker, KVWorker], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    a, b = workers
    monkeypatch.setattr(sender_links, "IDLE_S", 0.05)
    assert a.transfers.count(Stats(steps_total=7)) == Stats(steps_total=7)
    b.receive(1, A, [5, 9])
    a.send(send_to(b.geometry, B, 1, [3, 4], [5, 9]))
    until(lambda: 1 in a.ended and 1 in b.ended, a, b)
    sent = [NamedCount("shm", 2 * SMALL.block_bytes)]
    assert a.transfers.count(Stats()) == Stats(transfer_bytes=sent, sends_to=[B])
    assert a.transfers.count(Stats()) == Stats(transfer_bytes=sent), "nothing was sent since"
    until(lambda: len(a.links.watched) == 3, a, b)  # the idle link is closed
    assert a.transfers.count(Stats()).transfer_bytes == sent
    sockets = transfer_sockets(bus_at(tmp_path))
    stranger = sockets.connect_dealer(decode_places(b.geometry.kv_endpoint)[0].endpoint, b"x")
    stranger.send(msgspec.msgpack.encode(Stopped(1, "")))
    until(lambda: bool(b.transfers.count(Stats()).transfer_frames_dropped), a, b)
    stranger.close(0)
    sockets.close()
    for worker in workers:
        worker.transfers.close()
        worker.memory.renew()
        worker.transfers.open()
    b.receive(2, A, [7], a.geometry.kv_generation)
    a.send(send_to(b.geometry, B, 2, [3], [7]))
    until(lambda: 2 in a.ended and 2 in b.ended, a, b)
    assert a.transfers.count(Stats()).transfer_bytes == [NamedCount("shm", 3 * SMALL.block_bytes)]
    assert b.transfers.count(Stats()).transfer_frames_dropped == [NamedCount("stranger", 1)]


@pytest.mark.parametrize("side", ["sender", "receiver"])
@pytest.mark.parametrize("level", [1, 2])
def test_sleep_ends_all_transfers_and_the_next_memory_has_a_higher_generation(
    workers: tuple[KVWorker, KVWorker], side: str, level: int
) -> None:
    a, b = workers
    b.receive(1, A, [5, 6])
    a.send(send_to(b.geometry, B, 1, [3], [5], is_last=False))
    until(lambda: b.landed.get(1) == [5], a, b)
    asleep, other = (a, b) if side == "sender" else (b, a)
    before = asleep.geometry
    asleep.transfers.close()
    asleep.turn()
    assert 1 in asleep.ended and asleep.transfers.num_open == 0 and asleep.links.watched == []
    until(lambda: 1 in other.ended, other)
    if level == 1:
        asleep.memory.arena.drop()
        asleep.memory.arena.restore()
    else:
        asleep.memory.renew()
    asleep.transfers.open()
    after = asleep.geometry
    assert after.kv_generation == before.kv_generation + 1 and after.kv_endpoint != before.kv_endpoint
    a.memory.fill_random(1)
    b.receive(2, A, [7], a.geometry.kv_generation)
    a.send(send_to(b.geometry, B, 2, [3], [7]))
    until(lambda: 2 in a.ended and 2 in b.ended, a, b)
    assert b.landed[2] == [7] and holds(b, [7], a, [3])


def test_a_scheduler_that_attaches_again_changes_nothing(workers: tuple[KVWorker, KVWorker]) -> None:
    a, b = workers
    b.receive(1, A, [5, 6])
    a.send(send_to(b.geometry, B, 1, [3], [5], is_last=False))
    until(lambda: b.landed.get(1) == [5], a, b)
    for worker in workers:
        before = worker.geometry
        worker.transfers.open()
        assert worker.geometry == before
    assert a.transfers.open_transfers() == {1: [3]} and b.transfers.open_transfers() == {1: [5, 6]}
    a.send(send_to(b.geometry, B, 1, [4], [6]))
    until(lambda: 1 in a.ended and 1 in b.ended, a, b)
    assert a.is_complete(1)


def test_a_transfer_is_open_until_its_end_was_answered(
    workers: tuple[KVWorker, KVWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler's audit takes one that is not in the list, and has no answer, for lost."""
    (a, b), links = workers, list[SenderLink]()

    def open_link(*arguments: Any) -> SenderLink:
        links.append(SenderLink(*arguments))
        return links[-1]

    monkeypatch.setattr(sender_links, "SenderLink", open_link)
    b.receive(1, A, [5, 6])
    a.send(send_to(b.geometry, B, 1, [3], [5], is_last=False))
    until(lambda: b.landed.get(1) == [5], a, b)
    [link] = links
    link.abort(1, "ended between two polls")
    assert link.open_transfers() == {} and list(a.transfers.open_transfers()) == [1]
    until(lambda: 1 in a.ended and 1 in b.ended, a, b)
    assert a.transfers.open_transfers() == {} and not a.is_complete(1)


def test_a_link_is_closed_when_idle_and_when_its_worker_leaves(
    workers: tuple[KVWorker, KVWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = workers
    monkeypatch.setattr(sender_links, "IDLE_S", 0.05)
    b.receive(1, A, [5])
    a.send(send_to(b.geometry, B, 1, [3], [5]))
    until(lambda: 1 in a.ended and 1 in b.ended, a, b)
    until(lambda: len(a.links.watched) == 3, a, b)
    b.receive(4, A, [9])
    b.transfers.abort(KVAbort(4))
    until(lambda: 4 in b.ended, a, b)  # its link is closed on this side, too: nothing else answers
    monkeypatch.undo()
    b.receive(2, A, [6, 7])
    b.receive(3, 0xC, [8])  # its sender never opens a link
    a.send(send_to(b.geometry, B, 2, [3], [6], is_last=False))
    until(lambda: b.landed.get(2) == [6], a, b)
    a.transfers.on_gone(B)
    a.turn()
    assert a.ended[2] == [KVSendEnded(2, False)] and len(a.links.watched) == 3
    b.transfers.on_gone(0xC)
    until(lambda: 2 in b.ended and 3 in b.ended, b)


@pytest.mark.parametrize("connector", CONNECTORS)
def test_without_encryption_each_link_uses_the_ticket_of_a_transfer(
    make: Callable[..., KVWorker], connector: str
) -> None:
    a, b = (make(me, SMALL, encrypt=False, connector=connector) for me in (A, B))
    a.memory.fill_random()
    tickets = [bytes([number]) * 16 for number in range(4)]
    for number in (1, 2):
        b.receive(number, A, [number], ticket=tickets[number])
        a.send(send_to(b.geometry, B, number, [number], [number], ticket=tickets[number]))
    until(lambda: len(a.ended) == len(b.ended) == 2, a, b)
    assert a.is_complete(1) and a.is_complete(2)
    a.transfers.on_gone(B)
    b.receive(3, A, [3], ticket=tickets[3])
    a.send(send_to(b.geometry, B, 3, [3], [3], ticket=tickets[2]))  # of a transfer that has ended
    until(lambda: 3 in a.ended, a, b)
    assert not a.is_complete(3) and not b.memory.blocks[:, 3].any()


def test_the_ring_poller_wakes_up_while_blocks_move(workers: tuple[KVWorker, KVWorker]) -> None:
    """Each wait ends by a socket or the copy thread, or is short because the transfers are busy."""
    a, b = workers
    poller = Poller()
    b.receive(1, A, [5, 6])
    a.send(send_to(b.geometry, B, 1, [3, 4], [5, 6]))
    poller.add(*a.links.watched, *b.links.watched)
    began = time.monotonic()
    while not (1 in a.ended and 1 in b.ended):
        assert time.monotonic() - began < 15, "nothing woke it"
        poller.wait(0.001 if a.transfers.busy or b.transfers.busy else 20.0)
        a.turn()
        b.turn()
    poller.remove(*a.links.watched, *b.links.watched)


@pytest.mark.parametrize("connector", CONNECTORS)
def test_the_sender_is_killed(tmp_path: Path, make: Callable[..., KVWorker], connector: str) -> None:
    """What has landed stays, the transfer ends by itself, and the worker goes on with another sender."""
    b = make(B, LARGE, NUM_BLOCKS, connector=connector)
    with worker_process(bus_at(tmp_path), A, connector) as a:
        b.receive(1, A, list(range(NUM_BLOCKS)))
        b.receive(2, A, [])
        a.tell(plan_of(send_to(b.geometry, B, 1, list(range(16)), list(range(16)), is_last=False)))
        until(lambda: len(b.landed.get(1, [])) == 16, b)
        a.tell(plan_of(send_to(b.geometry, B, 1, list(range(16, 120)), list(range(16, 120)), is_last=False)))
        until(lambda: len(b.landed[1]) > 16, b)
        a.process.kill()
        a.process.join(10)
        until(lambda: 1 in b.ended, b)
    landed = b.landed[1]
    assert 16 < len(landed) <= 120 and b.failed[1] == [] and b.memory.without_kv == set(range(NUM_BLOCKS)) - {*landed}
    shape = b.memory.blocks.shape
    expected = np.random.default_rng(A).integers(0, 2**64, shape, dtype=np.uint64)
    assert (b.memory.blocks[:, landed] == expected[:, landed]).all()
    with worker_process(bus_at(tmp_path), 0xC, connector) as c:
        b.receive(3, 0xC, [1, 2])
        c.tell(plan_of(send_to(b.geometry, B, 3, [7, 8], [1, 2])))
        until(lambda: 3 in b.ended, b)
    assert sorted(b.landed[3]) == [1, 2]


@pytest.mark.parametrize("connector", CONNECTORS)
def test_the_receiver_is_killed(tmp_path: Path, make: Callable[..., KVWorker], connector: str) -> None:
    a = make(A, LARGE, NUM_BLOCKS, connector=connector)
    blocks = list(range(NUM_BLOCKS))
    with worker_process(bus_at(tmp_path), B, connector) as b:
        b.tell(KVReceive(1, A, 1, blocks))
        a.send(send_to(b.geometry, B, 1, blocks[:-1], blocks[:-1], is_last=False))
        until(lambda: bool(a.transfers.count(Stats()).transfer_bytes), a)
        b.process.kill()
        b.process.join(10)
        until(lambda: 1 in a.ended, a)
        assert a.ended[1] == [KVSendEnded(1, False)] and not a.memory.in_transfer
        a.send(send_to(b.geometry, B, 1, blocks[-1:], blocks[-1:]))
        until(lambda: len(a.ended[1]) == 2, a)
        assert len(a.links.watched) == 3
    with worker_process(bus_at(tmp_path), 0xC, connector) as c:
        c.tell(KVReceive(2, A, 1, [1, 2]))
        a.send(send_to(c.geometry, 0xC, 2, [7, 8], [1, 2]))
        until(lambda: 2 in a.ended, a)
        assert a.is_complete(2)
