"""How a rank that its leader has not started finds and joins its group: on another host, or started by Ray. No torch.

1. The leader opens a `RankEntrance`. Its `address` is in the leader's entry of the membership list, or is handed on by
   what starts the ranks.
2. What starts the rank gives it a `RankTicket`. The rank's process calls `join` before it loads.
3. `join` dials the leader's two sockets, with Curve keys on tcp. The leader compares the digest and answers. When all
   ranks are there, it tells them where torch's store is. The ordered stream of commands follows on the same link.

The entrance stays open while the group runs: a rank whose number is taken is told so.
"""

import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from blockyard.services.gpu_worker.parallel.commands import (
    Answer,
    Command,
    GroupComplete,
    GroupDigest,
    JoinAccepted,
    JoinAnswer,
    JoinRefused,
    LifeSign,
    RankFailed,
    RankJoin,
    Sign,
)
from blockyard.services.gpu_worker.ranks.group_digest import differences
from blockyard.shared.bus.curve import KeyPair
from blockyard.shared.bus.frame_links import AcceptedLink, FrameEnd, FrameLink, FrameListener
from blockyard.shared.bus.ring_query import ask_members
from blockyard.shared.bus.sockets import Sockets
from blockyard.shared.config.services.process import BusConfig
from blockyard.shared.config.services.worker import WorkerConfig
from blockyard.shared.errors import BlockyardError, ConfigError, LoadError, RankLostError
from blockyard.shared.messages import Member, RankAddress
from blockyard.shared.messages.base import Frame

POLL_S = 0.1
SAID_S = 0.2  # in which a leader's last word arrives
RETRY_S = 0.3  # between two attempts to find or join a group
TAKEN_S = 7.0  # a leader notices that a rank is gone within 4 s: a number that is taken for longer is taken
ANSWER_S = 2.0  # of the message bus
HEARD_S = 3.0  # in which ranks read why they are not of the group
TAKES_S = 4.0  # the leader's wait for an answer
FAILURES: dict[int, type[BlockyardError]] = {one.exit_code: one for one in (ConfigError, LoadError)}


class RankTicket(Frame, frozen=True):
    """What the process of a rank needs to join its group."""

    rank: int
    place: str  # where it is, in words for errors: "--node-rank 1 (host-b)"
    config: WorkerConfig  # of its host; `config.process.bus` reaches the membership list
    digest: GroupDigest
    group: str  # name
    folder: str  # private to the ranks of its host
    interface: str  # address or name of the network interface for torch's own links
    starter_pid: int  # the process that starts it, with which it ends
    address: RankAddress | None = None  # of the leader; None: in the membership list
    keys: tuple[bytes, bytes] | None = None  # public and secret, in Z85; None: those of `config.process.bus`, if any


@dataclass(frozen=True, slots=True)
class JoinedGroup:
    """A rank's links to its leader. `signs` may be given to another thread."""

    commands: FrameEnd[Command]
    signs: FrameEnd[Sign]
    store: str  # host and port of torch's store
    sockets: Sockets

    def close(self) -> None:
        """No other thread uses the links any more."""
        self.commands.close()
        self.signs.close()
        self.sockets.close()


class JoinedRank(NamedTuple):
    """The leader's links to a rank. All of `signs` belong to one thread, and so do all of `commands`."""

    commands: AcceptedLink[Answer]
    signs: AcceptedLink[Sign]
    place: str
    pid: int


class RankEntrance:
    """The leader's two sockets for ranks that it has not started."""

    def __init__(
        self, bus: BusConfig, group: str, places: Mapping[int, str], digest: GroupDigest, keys: KeyPair | None = None
    ) -> None:
        """places: of the ranks that are to join, in words. keys: instead of those of `bus`."""
        self._sockets, self._places, self._digest = Sockets(bus, keys=keys), places, digest
        self._signs: FrameListener[RankJoin, Sign] = FrameListener(self._sockets, RankJoin, Sign, self._on_sign)
        self._commands: FrameListener[RankJoin, Answer] = FrameListener(
            self._sockets, RankJoin, Answer, self._on_command
        )
        self.address = RankAddress(group, self._signs.endpoint, self._commands.endpoint)
        self._accepted: dict[int, tuple[AcceptedLink[Sign], RankJoin]] = {}
        self.joined: dict[int, JoinedRank] = {}  # by rank
        self._refusal: ConfigError | None = None
        self._refused: list[AcceptedLink[Sign]] = []  # those told so
        self._is_complete = False  # from then on another thread has the signs

    def gather(self, timeout_s: float, turn: Callable[[], None] = lambda: None) -> Mapping[int, JoinedRank]:
        """Waits for all ranks. turn: called about ten times a second, and may raise.

        Raises ConfigError for one that does not fit, LoadError if some are missing at the end of the time.
        """
        end_s = time.monotonic() + timeout_s
        while len(self.joined) < len(self._places) or not all(map(self._is_there, self._places)):
            turn()
            self._signs.wait(POLL_S)
            self._commands.wait(0)
            if self._refusal is not None:
                raise self._refusal
            if time.monotonic() > end_s:
                missing = dict.fromkeys(place for rank, place in self._places.items() if rank not in self.joined)
                raise LoadError(
                    f"no ranks of {', '.join(missing)} within {timeout_s:g} s (--rank-timeout): the group is not "
                    "complete"
                )
        return self.joined

    def complete(self, store: str) -> None:
        """Tells all ranks that the group is complete. Raises RankLostError."""
        self._is_complete = True
        for rank, joined in self.joined.items():
            try:
                joined.commands.send(GroupComplete(store))
            except OSError as e:
                raise RankLostError(f"rank {rank} has ended") from e

    def give_up(self, error: BlockyardError) -> None:
        """Tells ranks that have joined why the group will not be complete, and waits until all have heard.

        A frame that a peer has not read is lost when its link is closed.
        """
        told = [*(link for link, _ in self._accepted.values()), *self._refused]
        frame: Sign = RankFailed(str(error), error.exit_code)
        deadline = time.monotonic() + HEARD_S
        while told and time.monotonic() < deadline:
            told = [link for link in told if _is_open(link, frame)]
            frame = LifeSign()
            time.sleep(POLL_S)

    def close_signs(self) -> None:
        """Ranks notice at once, and end. For the thread that has the signs."""
        self._signs.close()

    def close(self) -> None:
        """No other thread uses the sockets any more."""
        self._signs.close()
        self._commands.close()
        self._sockets.close()

    def _on_sign(self, route: bytes, frame: RankJoin) -> None:
        refused = self._check(frame)
        answer: JoinAnswer = refused or JoinAccepted()
        if refused is None:
            self._accepted[frame.rank] = self._signs.accept(route, TAKES_S), frame
        elif not self._is_complete:
            self._refused.append(self._signs.accept(route, TAKES_S))
        try:
            self._signs.send(route, msgspec.msgpack.encode(answer))
        except ConnectionError:
            self._accepted.pop(frame.rank, None)

    def _check(self, frame: RankJoin) -> JoinRefused | None:
        differs = differences(frame.digest, self._digest)
        if differs:
            self._refusal = ConfigError(f"{frame.place} has {differs}")
            return JoinRefused(str(self._refusal), ConfigError.exit_code)
        if frame.rank not in self._places:
            return JoinRefused(f"{frame.place}: the leader starts rank {frame.rank} itself", ConfigError.exit_code)
        if self._is_there(frame.rank):
            words = (
                f"{frame.place}: rank {frame.rank} is in the group already, from {self._accepted[frame.rank][1].place}"
            )
            return JoinRefused(words, ConfigError.exit_code, is_taken=True)
        return None

    def _is_there(self, rank: int) -> bool:
        if self._is_complete:
            return True
        if rank not in self._accepted:
            return False
        try:
            self._accepted[rank][0].send(LifeSign())
        except OSError:  # it ended before the group was complete
            self._accepted.pop(rank)[0].close()
            self.joined.pop(rank, None)
            return False
        return True

    def _on_command(self, route: bytes, frame: RankJoin) -> None:
        if (accepted := self._accepted.get(frame.rank)) and accepted[1] == frame:
            commands = self._commands.accept(route, TAKES_S)
            self.joined[frame.rank] = JoinedRank(commands, accepted[0], frame.place, frame.pid)


def _is_open(link: AcceptedLink[Sign], frame: Sign) -> bool:
    try:
        link.send(frame)
    except OSError:
        return False
    return True


class TakenError(ConfigError):
    """The rank's number is taken, perhaps by a process that is gone."""


def join(ticket: RankTicket, timeout_s: float) -> JoinedGroup:
    """Finds the leader and joins its group, again if the leader ends meanwhile.

    Raises ConfigError or LoadError: refused, a number that is taken, or no complete group at the end of the time.
    """
    with ExitStack() as closing:
        sockets = Sockets(ticket.config.process.bus, keys=None if ticket.keys is None else KeyPair(*ticket.keys))
        closing.callback(sockets.close)
        joined = _join_any(sockets, ticket, timeout_s)
        closing.pop_all()
    return joined


def _join_any(sockets: Sockets, ticket: RankTicket, timeout_s: float) -> JoinedGroup:
    bus, end_s, taken_s = ticket.config.process.bus, time.monotonic() + timeout_s, 0.0
    said = f"{ticket.place}: no leader of the group {ticket.group} at {bus.registry} within {timeout_s:g} s"
    while True:
        try:
            address = ticket.address or find_leader(bus, ticket.group)
            return _join_leader(sockets, address, ticket, end_s)
        except TakenError as e:
            taken_s = taken_s or time.monotonic()
            if time.monotonic() - taken_s > TAKEN_S:
                raise
            said = str(e)
        except RankLostError as e:
            taken_s, said = 0.0, f"{ticket.place}: {e} within {timeout_s:g} s"
        if time.monotonic() > end_s:
            raise LoadError(f"{said} (--rank-timeout)")
        time.sleep(RETRY_S)


def find_leader(bus: BusConfig, group: str) -> RankAddress:
    """Returns where ranks join a group. Raises RankLostError if it has no leader now, ConfigError if it has two."""
    try:
        members = ask_members(bus, ANSWER_S).members
    except BlockyardError as e:
        raise RankLostError(f"no membership list from the message bus at {bus.registry}") from e
    found = leaders(members, group)
    if not found:
        raise RankLostError(f"no leader (--node-rank 0) of the group {group} at {bus.registry}")
    if len(found) > 1:
        names = " and ".join(name for name, _ in found)
        raise TakenError(
            f"--node-rank 0 of the group {group} is taken by {names}; groups have names of their own: --name"
        )
    return found[0][1]


def leaders(members: Iterable[Member], group: str) -> list[tuple[str, RankAddress]]:
    """Returns the names of leaders of a group, and where ranks join them."""
    return [(member.name, member.ranks) for member in members if member.ranks and member.ranks.group == group]


def _join_leader(sockets: Sockets, address: RankAddress, ticket: RankTicket, end_s: float) -> JoinedGroup:
    """Raises RankLostError if the leader is not there, or ends."""
    hello = RankJoin(ticket.rank, ticket.place, ticket.digest, os.getpid())
    signs: FrameLink[Sign | JoinAnswer] = FrameLink(sockets, address.signs, Sign | JoinAnswer)
    commands: FrameLink[Command] = FrameLink(sockets, address.commands, Command)
    try:
        signs.send(hello)
        # a leader that stands still is noticed by the link itself
        answer = signs.receive() if signs.wait(end_s - time.monotonic()) else None
        if isinstance(answer, JoinRefused):
            kind = TakenError if answer.is_taken else FAILURES.get(answer.exit_code, LoadError)
            raise kind(answer.detail)
        if not isinstance(answer, JoinAccepted):
            raise RankLostError("the leader does not answer")
        commands.send(hello)
        while not commands.wait(POLL_S):
            _check_leader(signs)
            if time.monotonic() > end_s:
                raise RankLostError("other ranks have not joined the group")
        complete = commands.receive()
        if not isinstance(complete, GroupComplete):
            while signs.wait(SAID_S):
                _check_leader(signs)
            raise RankLostError("the leader has ended")
    except (OSError, BlockyardError) as e:
        signs.close()
        commands.close()
        if isinstance(e, OSError):
            raise RankLostError(f"the leader has ended: {e}") from e
        raise
    return JoinedGroup(commands, signs.of(Sign), complete.store, sockets)


def _check_leader(signs: FrameLink[Sign | JoinAnswer]) -> None:
    """Raises what the leader says about its end, or RankLostError if it has ended."""
    said = signs.receive() if signs.is_readable else LifeSign()
    if isinstance(said, RankFailed):
        raise FAILURES.get(said.exit_code, LoadError)(said.detail)
    if said is None:
        raise RankLostError("the leader has ended")
