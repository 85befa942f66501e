"""Replicas that have the experts together meet in any order and again, agree on steps, and end together."""

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from blockyard.services.gpu_worker.parallel.commands import LifeSign, Sign
from blockyard.services.gpu_worker.parallel.meeting import Meeting
from blockyard.services.gpu_worker.parallel.rank_group import GroupStores, RankGroup, connect_cpus
from blockyard.services.gpu_worker.parallel.replicas import ReplicaRanks, StepOffer
from blockyard.services.gpu_worker.parallel.shares import WHOLE, Shard
from blockyard.services.gpu_worker.ranks import replica_meeting, signs
from blockyard.services.gpu_worker.ranks.replica_meeting import MetReplicas, ReplicaJoin, meet
from blockyard.services.gpu_worker.ranks.replica_team import ReplicaTeam
from blockyard.shared.errors import BlockyardError, LoadError, RankLostError
from blockyard.shared.process.frame_pipe import FramePipe

SIZE = 3


def meet_all(
    folder: Path, order: list[int], pause_s: float = 0.0, hosts: Sequence[Sequence[str]] = ((),) * SIZE
) -> list[MetReplicas]:
    """Returns what each replica has. order: in which they begin. hosts: of its ranks."""
    with ThreadPoolExecutor(SIZE) as pool:
        met = {}
        for replica in order:
            met[replica] = pool.submit(meet, folder, Shard(replica, SIZE), 20.0, lambda: None, hosts[replica])
            time.sleep(pause_s)
        return [met[replica].result() for replica in range(SIZE)]


def close(met: MetReplicas) -> None:
    for pair in met.sockets.values():
        for one in pair:
            one.close()


def check(met: list[MetReplicas]) -> None:
    """Each pair of replicas has two connections of its own."""
    assert len({one.folder for one in met}) == 1 and met[0].folder.stat().st_mode & 0o777 == 0o700
    for replica, one in enumerate(met):
        assert one.sockets.keys() == set(range(SIZE)) - {replica}
        for other, pair in one.sockets.items():
            for i, end in enumerate(pair):
                assert not end.get_inheritable()
                end.sendall(bytes([replica, other, i]))
    for replica, one in enumerate(met):
        for other, pair in one.sockets.items():
            assert [end.recv(8) for end in pair] == [bytes([other, replica, i]) for i in range(2)]
        close(one)


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0]])
def test_replicas_meet_in_any_order_and_again(order: list[int], tmp_path: Path) -> None:
    first = meet_all(tmp_path, order, 0.1)
    check(first)
    (tmp_path / replica_meeting.NAME).touch()  # a first replica that was killed leaves it
    again = meet_all(tmp_path, order)
    assert again[0].folder != first[0].folder and not first[0].folder.exists()
    check(again)


def test_ranks_of_several_hosts_meet_at_a_store_of_the_first(tmp_path: Path) -> None:
    hosts = [["127.0.0.1"], ["127.0.0.1"], ["127.0.0.1", "127.0.0.2"]]
    met = meet_all(tmp_path, [0, 1, 2], hosts=hosts)
    assert len({one.store for one in met}) == 1 and met[0].store.startswith("127.0.0.1:")

    def connect(shard: Shard, meeting: Meeting, name: str) -> RankGroup:
        return connect_cpus(shard, GroupStores(meeting), name)

    def least(replica: int) -> list[int]:
        own = ReplicaRanks(met[replica].meeting, Shard(replica, SIZE), 0)
        groups = [own.connect(connect), own.connect_stage(connect, WHOLE, 0)]
        assert groups[0] is own.connect(connect)
        return [group.least(5 + replica) for group in groups]

    with ThreadPoolExecutor(SIZE) as pool:
        assert list(pool.map(least, range(SIZE))) == [[5, 5]] * SIZE
    for one in met:
        close(one)


def test_one_that_joined_and_is_gone_is_waited_for_again(tmp_path: Path) -> None:
    with ThreadPoolExecutor(SIZE) as pool:
        first = pool.submit(meet, tmp_path, Shard(0, SIZE), 20.0, lambda: None)
        for frame in (msgspec.msgpack.encode(ReplicaJoin(1, 0, [])), b"of a stranger"):
            while True:
                with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as gone:
                    try:
                        gone.connect(str(tmp_path / replica_meeting.NAME))
                    except OSError:
                        time.sleep(0.01)
                        continue
                    gone.send(frame)
                    break
        last = pool.submit(meet, tmp_path, Shard(2, SIZE), 20.0, lambda: None)
        time.sleep(0.3)
        assert not first.done() and not last.done()
        own = meet(tmp_path, Shard(1, SIZE), 20.0, lambda: None)
        check([first.result(), own, last.result()])


def test_one_that_waits_for_a_first_replica_that_ends_joins_its_successor(tmp_path: Path) -> None:
    def ended() -> None:
        raise SystemExit(0)

    class Ending(Exception):
        pass

    end = threading.Event()

    def turn() -> None:
        if end.is_set():
            raise Ending

    with ThreadPoolExecutor(SIZE) as pool:
        dying = pool.submit(meet, tmp_path, Shard(0, SIZE), 20.0, turn)
        other = pool.submit(meet, tmp_path, Shard(1, SIZE), 20.0, lambda: None)
        time.sleep(0.3)
        end.set()
        with pytest.raises(Ending):
            dying.result()
        last = pool.submit(meet, tmp_path, Shard(2, SIZE), 20.0, lambda: None)
        check([meet(tmp_path, Shard(0, SIZE), 20.0, lambda: None), other.result(), last.result()])
    with pytest.raises(SystemExit):
        meet(tmp_path, Shard(1, SIZE), 20.0, ended)


@pytest.mark.parametrize(("replica", "missing"), [(0, "replica 1, 2"), (1, "replica 0")])
def test_replicas_that_do_not_come_are_named(replica: int, missing: str, tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=f"--data-parallel-size 3: {missing} has not come within 0.2 s"):
        meet(tmp_path, Shard(replica, SIZE), 0.2, lambda: None)


class Teams:
    def __init__(self, folder: Path) -> None:
        self.errors: list[tuple[int, BlockyardError]] = []
        met = meet_all(folder, [0, 1, 2])
        assert all(one.pids == [os.getpid()] * SIZE for one in met)
        self.all = [ReplicaTeam(Shard(i, SIZE), one, self._ending(i)) for i, one in enumerate(met)]

    def _ending(self, replica: int) -> Callable[[BlockyardError], None]:
        return lambda error: self.errors.append((replica, error))


def test_all_see_the_same_offers_of_each_step(tmp_path: Path) -> None:
    teams = Teams(tmp_path).all
    assert not any(team.is_called for team in teams)

    def offer(replica: int) -> list[list[StepOffer]]:
        return [teams[replica].agree(StepOffer(10 * step + replica, replica > 0)) for step in range(20)]

    with ThreadPoolExecutor(SIZE) as pool:
        first = pool.submit(offer, 0)
        deadline = time.monotonic() + 5
        while not (teams[1].is_called and teams[2].is_called):
            assert time.monotonic() < deadline
        assert not teams[0].is_called and not first.done()
        others = [pool.submit(offer, replica) for replica in (1, 2)]
        assert first.result() == others[0].result() == others[1].result()
    assert [one.num_rows for one in first.result()[3]] == [30, 31, 32]
    assert not any(team.is_called for team in teams)
    for team in teams:
        team.close()


def test_one_that_is_gone_ends_all(tmp_path: Path) -> None:
    found = Teams(tmp_path)
    found.all[1].close()
    with pytest.raises(RankLostError, match="replica 1"):
        found.all[0].agree(StepOffer(1, False))
    with pytest.raises(RankLostError, match="replica 1 has ended"):
        _ = found.all[2].is_called
    deadline = time.monotonic() + 5
    while len(found.errors) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert {replica: str(error) for replica, error in found.errors} == dict.fromkeys(
        (0, 2), "replica 1 of 3 has ended; all replicas end"
    )
    assert all(isinstance(error, RankLostError) for _, error in found.errors)
    for team in (found.all[0], found.all[2]):
        team.close()


def test_one_that_is_silent_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signs, "SILENT_S", 1.0)
    monkeypatch.setattr(signs, "SIGN_S", 0.1)
    stopped = subprocess.Popen(["sleep", "60"])
    met, errors = meet_all(tmp_path, [0, 1, 2]), list[BlockyardError]()
    pids = [stopped.pid] * SIZE
    teams = [ReplicaTeam(Shard(i, SIZE), replace(met[i], pids=pids), errors.append) for i in (0, 1)]
    for team in teams:
        team.serve()
    signs_of = [FramePipe[Sign](both[1], Sign) for both in met[2].sockets.values()]
    for pipe in signs_of:
        pipe.send(LifeSign(0, True))  # the only one
    assert stopped.wait(5) == -signal.SIGKILL
    for team in teams:
        team.close()
    assert errors and all("replica 2 of 3 is silent for" in str(error) for error in errors)
    close(met[2])
