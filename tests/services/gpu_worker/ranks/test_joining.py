"""Ranks that their leader has not started join its group over links with Curve keys, or are told why they cannot."""

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest
from rig import registry
from tcp_addresses import tcp_bus

from blockyard.services.gpu_worker.parallel.commands import Begin, GroupDigest, LifeSign, TransfersClosed
from blockyard.services.gpu_worker.ranks import joining
from blockyard.services.gpu_worker.ranks.entrance import RankEntrance
from blockyard.services.gpu_worker.ranks.joining import JoinedGroup, RankTicket, TakenError, join, leaders
from blockyard.shared.bus.curve import new_keys
from blockyard.shared.bus.links import Links
from blockyard.shared.bus.ring_query import ask_members
from blockyard.shared.config.services.process import BusConfig, ProcessConfig
from blockyard.shared.config.services.worker import WorkerConfig
from blockyard.shared.errors import BlockyardError, ConfigError, LoadError
from blockyard.shared.messages import Role, WorkerIn

DIGEST = GroupDigest("0.1 abc", "4 files", b'{"seed": 0, "dtype": "auto"}')


@pytest.fixture
def bus(tmp_path: Path) -> BusConfig:
    return tcp_bus(tmp_path / "keys")


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def entrance_of(bus: BusConfig, closing: ExitStack, ranks: tuple[int, ...] = (2, 3)) -> RankEntrance:
    made = RankEntrance(bus, "workers", dict.fromkeys(ranks, "--node-rank 1"), DIGEST)
    closing.callback(made.close)
    return made


def ticket(bus: BusConfig, entrance: RankEntrance, rank: int, digest: GroupDigest = DIGEST) -> RankTicket:
    config = WorkerConfig(process=ProcessConfig(name="w", bus=bus), model_path="/none")
    place = f"--node-rank 1 (rank {rank})"
    return RankTicket(rank, place, config, digest, "workers", "/none", "127.0.0.1", 1, entrance.address)


class Joining(threading.Thread):
    """A rank that joins, in a thread."""

    def __init__(self, ticket: RankTicket, timeout_s: float = 20.0) -> None:
        super().__init__()
        self._ticket, self._timeout_s = ticket, timeout_s
        self.group: JoinedGroup | None = None
        self.error: BlockyardError | None = None
        self.start()

    def run(self) -> None:
        try:
            self.group = join(self._ticket, self._timeout_s)
        except BlockyardError as e:
            self.error = e

    def joined(self, closing: ExitStack) -> JoinedGroup:
        self.join(20)
        assert self.group is not None, self.error
        closing.callback(self.group.close)
        return self.group

    def refused(self) -> BlockyardError:
        self.join(20)
        assert self.error is not None
        return self.error


def test_ranks_join_and_get_the_stream(bus: BusConfig, closing: ExitStack) -> None:
    entrance = entrance_of(bus, closing)
    ranks = [Joining(ticket(bus, entrance, rank)) for rank in (3, 2)]
    found = entrance.gather(10)
    entrance.complete("10.0.0.1:99")
    assert sorted(found) == [2, 3]
    groups = dict(zip((3, 2), (one.joined(closing) for one in ranks), strict=True))
    for rank, group in groups.items():
        assert group.store == "10.0.0.1:99"
        found[rank].commands.send(Begin([rank]))
        group.commands.send(TransfersClosed())
        group.signs.send(LifeSign(rank))
        assert group.commands.receive() == Begin([rank])
        assert found[rank].commands.receive() == TransfersClosed()
        assert found[rank].signs.receive() == LifeSign(rank)


def test_a_rank_with_another_key_finds_nobody(bus: BusConfig, closing: ExitStack) -> None:
    entrance = entrance_of(bus, closing)
    public, secret = (pair := new_keys()).public, pair.secret
    other = msgspec.structs.replace(ticket(bus, entrance, 2), keys=(public, secret))
    error = Joining(other, 0.5).refused()
    assert isinstance(error, LoadError) and "(--rank-timeout)" in str(error)


@pytest.mark.parametrize(
    ("digest", "said"),
    [
        (GroupDigest("0.2 abc", *list(msgspec.structs.astuple(DIGEST))[1:]), "another build"),
        (GroupDigest(DIGEST.build, "5 files", DIGEST.flags), "other weights"),
        (GroupDigest(DIGEST.build, DIGEST.weights, b'{"seed": 1, "dtype": "auto"}'), "flags than the leader: seed 1"),
    ],
)
def test_a_digest_that_differs_is_one_error_at_both_ends(
    bus: BusConfig, closing: ExitStack, digest: GroupDigest, said: str
) -> None:
    entrance = RankEntrance(bus, "workers", {2: "--node-rank 1"}, DIGEST)
    rank = Joining(ticket(bus, entrance, 2, digest))
    with pytest.raises(ConfigError, match=said) as raised:
        entrance.gather(10)
    entrance.give_up(raised.value)
    entrance.close()
    error = rank.refused()
    assert isinstance(error, ConfigError) and said in str(error) and "--node-rank 1 (rank 2)" in str(error)


def test_missing_and_doubled_ranks(bus: BusConfig, closing: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "TAKEN_S", 0.5)
    entrance = entrance_of(bus, closing)
    first = Joining(ticket(bus, entrance, 2), 4.0)
    with pytest.raises(LoadError, match=r"no ranks of --node-rank 1 within 1 s \(--rank-timeout\)"):
        entrance.gather(1.0)
    second = Joining(ticket(bus, entrance, 2))
    with pytest.raises(LoadError) as raised:
        entrance.gather(2.5)
    error = second.refused()
    assert isinstance(error, TakenError) and "rank 2 is in the group already" in str(error)
    assert "other ranks have not joined the group within 4 s (--rank-timeout)" in str(first.refused())
    third = Joining(ticket(bus, entrance, 3))
    with pytest.raises(LoadError):
        entrance.gather(0.5)
    entrance.give_up(raised.value)
    assert str(third.refused()) == str(raised.value), "those that have joined are told why the group ends"


def test_the_leader_is_found_on_the_membership_list(
    bus: BusConfig, closing: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that ends before the group is complete is forgotten, and its successor is joined."""
    monkeypatch.setattr(joining, "ANSWER_S", 1.0)
    first = RankEntrance(bus, "workers", {2: "there"}, DIGEST)
    rank = Joining(msgspec.structs.replace(ticket(bus, first, 2), address=None))
    with registry(bus):
        with Links("gpu_worker 0", Role.GPU_WORKER, bus, WorkerIn, own_heartbeat=True) as links:
            links.update(ranks=first.address)
            first.gather(10)
        first.close()
        entrance = entrance_of(bus, closing, (2,))
        with Links("gpu_worker 0", Role.GPU_WORKER, bus, WorkerIn, own_heartbeat=True) as links:
            links.update(ranks=entrance.address)
            entrance.gather(10)
            entrance.complete("10.0.0.1:99")
        assert rank.joined(closing).store == "10.0.0.1:99"


def test_two_leaders_are_one_error(bus: BusConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "TAKEN_S", 0.5)
    entrance = RankEntrance(bus, "workers", {2: "there"}, DIGEST)
    with registry(bus), ExitStack() as stack:
        for name in ("one", "two"):
            links = stack.enter_context(Links(name, Role.GPU_WORKER, bus, WorkerIn, own_heartbeat=True))
            links.update(ranks=entrance.address)
        end_s = time.monotonic() + 20.0
        while len(leaders(ask_members(bus, 5.0).members, "workers")) < 2 and time.monotonic() < end_s:
            time.sleep(0.02)
        error = Joining(msgspec.structs.replace(ticket(bus, entrance, 2), address=None)).refused()
    entrance.close()
    assert isinstance(error, TakenError) and "--node-rank 0 of the group workers is taken by" in str(error)
