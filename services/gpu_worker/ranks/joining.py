"""How a rank that its leader has not started finds and joins its group: on another host, or started by Ray. No torch.

1. The leader opens an `entrance.RankEntrance`. Its `address` is in the leader's entry of the membership list, or is
   handed on by what starts the ranks.
2. What starts the rank gives it a `RankTicket`. The rank's process calls `join` before it loads.
3. `join` dials the leader's two sockets, with Curve keys on tcp. The leader compares the digest and answers. When all
   ranks are there, it tells them where torch's store is. The ordered stream of commands follows on the same link.

The entrance stays open while the group runs: a rank whose number is taken is told so.
"""

import os
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass

from blockyard.services.gpu_worker.parallel.commands import (
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
from blockyard.shared.bus.curve import KeyPair
from blockyard.shared.bus.frame_links import FrameEnd, FrameLink
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
    leader: str = "--node-rank 0"  # in words for errors


@dataclass(frozen=True, slots=True)
class JoinedGroup:
    """A rank's links to its leader. `signs` may be given to another thread."""

    commands: FrameLink[Command]
    signs: FrameEnd[Sign]
    store: str  # host and port of torch's store
    sockets: Sockets

    def close(self) -> None:
        """No other thread uses the links any more."""
        self.commands.close()
        self.signs.close()
        self.sockets.close()


class TakenError(ConfigError):
    """The rank's number is taken, perhaps by a process that is gone."""


def join(ticket: RankTicket, timeout_s: float, turn: Callable[[], None] = lambda: None) -> JoinedGroup:
    """Finds the leader and joins its group, again if the leader ends meanwhile.

    turn: called some times a second, and may raise. Raises ConfigError or LoadError: refused, a number that is taken,
    or no complete group at the end of the time.
    """
    with ExitStack() as closing:
        sockets = Sockets(ticket.config.process.bus, keys=None if ticket.keys is None else KeyPair(*ticket.keys))
        closing.callback(sockets.close)
        joined = _join_any(sockets, ticket, timeout_s, turn)
        closing.pop_all()
    return joined


def _join_any(sockets: Sockets, ticket: RankTicket, timeout_s: float, turn: Callable[[], None]) -> JoinedGroup:
    bus, end_s, taken_s = ticket.config.process.bus, time.monotonic() + timeout_s, 0.0
    said = f"{ticket.place}: no leader of the group {ticket.group} at {bus.registry} within {timeout_s:g} s"
    while True:
        turn()
        try:
            address = ticket.address or find_leader(bus, ticket.group, ticket.leader)
            return _join_leader(sockets, address, ticket, end_s, turn)
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


def find_leader(bus: BusConfig, group: str, leader: str) -> RankAddress:
    """Returns where ranks join a group. leader: in words.

    Raises RankLostError if it has no leader now, ConfigError if it has two.
    """
    try:
        members = ask_members(bus, ANSWER_S).members
    except BlockyardError as e:
        raise RankLostError(f"no membership list from the message bus at {bus.registry}") from e
    found = leaders(members, group)
    if not found:
        raise RankLostError(f"no leader ({leader}) of the group {group} at {bus.registry}")
    if len(found) > 1:
        names = " and ".join(name for name, _ in found)
        raise TakenError(f"{leader} of the group {group} is taken by {names}; groups have names of their own: --name")
    return found[0][1]


def leaders(members: Iterable[Member], group: str) -> list[tuple[str, RankAddress]]:
    """Returns the names of leaders of a group, and where ranks join them."""
    return [(member.name, member.ranks) for member in members if member.ranks and member.ranks.group == group]


def _join_leader(
    sockets: Sockets, address: RankAddress, ticket: RankTicket, end_s: float, turn: Callable[[], None]
) -> JoinedGroup:
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
            turn()
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
