"""How the leaders of replicas find each other: processes that one launcher has started, in any order and again.

Replica 0 listens on a socket in the ring's private folder. Once all others have joined, it makes a new folder and pairs
of sockets for every two replicas, and hands them over. So all of them are of the same start: one that has joined a
replica 0 that ends meanwhile joins its successor. If their followers are on several hosts, it also opens the socket of
torch's store for the groups across replicas.
"""

import contextlib
import os
import select
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import msgspec

from blockyard.services.gpu_worker.parallel.meeting import LOOPBACK, Meeting
from blockyard.services.gpu_worker.parallel.shares import Shard
from blockyard.services.gpu_worker.ranks import network
from blockyard.shared.errors import LoadError
from blockyard.shared.messages.base import Frame

FIRST = 0  # the replica that listens
NAME = "replicas"
TURN_S = 0.1
SOCKETS_OF_PAIR = 2
MOST_BYTES = 4096
_encode = msgspec.msgpack.Encoder().encode


class ReplicaJoin(Frame, frozen=True):
    """A replica is there."""

    replica: int
    pid: int
    hosts: list[str]  # addresses of its ranks' hosts; empty: all of them are here


class ReplicasComplete(Frame, frozen=True):
    """All are there. With the frame come two sockets to each other replica, in the order of their numbers."""

    folder: str
    pids: list[int]  # by replica
    store: str = ""  # see `MetReplicas`


_joins = msgspec.msgpack.Decoder(ReplicaJoin)
_completes = msgspec.msgpack.Decoder(ReplicasComplete)


@dataclass(frozen=True, slots=True)
class MetReplicas:
    """What a replica has of the others of the same start."""

    folder: Path  # private to all of them
    pids: list[int]  # by replica
    sockets: dict[int, tuple[socket.socket, socket.socket]]  # by replica: for offers, and for signs of life
    store: str = ""  # host and port of torch's store, which replica 0 serves; empty: all ranks are on this host
    listener: int | None = None  # of replica 0: the descriptor of the store's socket, which listens already

    @property
    def meeting(self) -> Meeting:
        """Of the leader, for the groups across replicas."""
        interface = self.store.rpartition(":")[0].strip("[]") or LOOPBACK
        return Meeting(self.folder, interface, self.store, self.listener)


def meet(
    folder: Path,
    replica: Shard,
    timeout_s: float,
    turn: Callable[[], None],
    hosts: Sequence[str] = (),
    name: str = NAME,
) -> MetReplicas:
    """Waits for all replicas. folder: private to the ring. turn: called some times a second; ends the wait by raising.

    name: of a file there, which others that meet in the folder do not have. hosts: addresses of the hosts of this
    replica's ranks, this one's first; empty: all of them are here. Raises LoadError if some replicas are missing by
    then.
    """
    end_s = time.monotonic() + timeout_s

    def check(missing: str) -> None:
        turn()
        if time.monotonic() > end_s:
            raise LoadError(
                f"--enable-expert-parallel with --data-parallel-size {replica.size}: {missing} has not come within "
                f"{timeout_s:g} s (--rank-timeout)"
            )

    if replica.rank == FIRST:
        return _gather(folder / name, replica.size, check, hosts)
    return _join(folder / name, replica, check, hosts)


def _gather(path: Path, size: int, check: Callable[[str], None], hosts: Sequence[str]) -> MetReplicas:
    joined, pids, of_all = dict[int, socket.socket](), [os.getpid()] * size, {FIRST: hosts}
    path.unlink(missing_ok=True)
    with contextlib.ExitStack() as closing, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        closing.callback(path.unlink, missing_ok=True)
        listener.listen(size)
        listener.settimeout(TURN_S)
        while missing := [i for i in range(1, size) if i not in joined or _has_ended(joined[i])]:
            check("replica " + ", ".join(map(str, missing)))
            with contextlib.suppress(TimeoutError):
                end, _ = listener.accept()
                closing.callback(end.close)
                end.settimeout(TURN_S)
                try:
                    frame = _joins.decode(end.recv(MOST_BYTES))
                    joined[frame.replica], pids[frame.replica], of_all[frame.replica] = end, frame.pid, frame.hosts
                except (OSError, msgspec.MsgspecError):
                    end.close()  # it joins again, if it is still there
        return _hand_over(path, joined, pids, [host for some in of_all.values() for host in some])


def _hand_over(path: Path, joined: dict[int, socket.socket], pids: list[int], hosts: Sequence[str]) -> MetReplicas:
    """One that is gone by now closes its sockets, which ends the others, too."""
    listener, store = network.listen(hosts[0]) if len(set(hosts)) > 1 else (None, "")
    for old in path.parent.glob(f"{path.name}-*"):  # of starts that have ended
        shutil.rmtree(old, ignore_errors=True)
    own = Path(tempfile.mkdtemp(prefix=f"{path.name}-", dir=path.parent))
    sockets: dict[int, dict[int, tuple[socket.socket, socket.socket]]] = {i: {} for i in (FIRST, *joined)}
    for one, other in combinations(sorted(sockets), 2):
        pairs = [socket.socketpair() for _ in range(SOCKETS_OF_PAIR)]
        sockets[one][other], sockets[other][one] = ((pairs[0][i], pairs[1][i]) for i in range(2))
    frame = _encode(ReplicasComplete(str(own), pids, store))
    for replica, end in joined.items():
        given = [one for _, both in sorted(sockets[replica].items()) for one in both]
        with contextlib.suppress(OSError):
            socket.send_fds(end, [frame], [one.fileno() for one in given])
        for one_end in given:
            one_end.close()
    return MetReplicas(own, pids, sockets[FIRST], store, None if listener is None else listener.detach())


def _join(path: Path, replica: Shard, check: Callable[[str], None], hosts: Sequence[str]) -> MetReplicas:
    while True:
        check(f"replica {FIRST}")
        end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with end, contextlib.suppress(OSError):  # it does not listen yet, or has ended meanwhile
            end.connect(str(path))
            end.send(_encode(ReplicaJoin(replica.rank, os.getpid(), list(hosts))))
            end.settimeout(TURN_S)
            if (met := _wait(end, replica, check)) is not None:
                return met
        time.sleep(TURN_S)


def _wait(end: socket.socket, replica: Shard, check: Callable[[str], None]) -> MetReplicas | None:
    """Waits for sockets to the others. None: replica 0 has ended."""
    while True:
        check("another replica")
        with contextlib.suppress(TimeoutError):
            frame, numbers, _, _ = socket.recv_fds(end, MOST_BYTES, SOCKETS_OF_PAIR * replica.size)
            if not frame:
                return None
            ends = [socket.socket(fileno=number) for number in numbers]
            for one in ends:
                one.set_inheritable(False)
            others = [i for i in range(replica.size) if i != replica.rank]
            pairs = zip(ends[::SOCKETS_OF_PAIR], ends[1::SOCKETS_OF_PAIR], strict=True)
            complete = _completes.decode(frame)
            sockets = dict(zip(others, pairs, strict=True))
            return MetReplicas(Path(complete.folder), complete.pids, sockets, complete.store)


def _has_ended(end: socket.socket) -> bool:
    """One that waits sends nothing more: what can be read is its end."""
    return bool(select.select([end], [], [], 0)[0])
