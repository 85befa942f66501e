"""Where a leader takes up ranks that it has not started. What such a rank does: `joining`. No torch."""

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from blockyard.services.gpu_worker.parallel.commands import (
    Answer,
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
from blockyard.shared.bus.frame_links import AcceptedLink, FrameListener
from blockyard.shared.bus.sockets import Sockets
from blockyard.shared.config.services.process import BusConfig
from blockyard.shared.errors import BlockyardError, ConfigError, LoadError, RankLostError
from blockyard.shared.messages import RankAddress

POLL_S = 0.1
HEARD_S = 3.0  # in which ranks read why they are not of the group
TAKES_S = 4.0  # the leader's wait for an answer


class JoinedRank(NamedTuple):
    """The leader's links to a rank. All of `signs` belong to one thread, and so do all of `commands`."""

    commands: AcceptedLink[Any]  # of the frames that the entrance accepts
    signs: AcceptedLink[Sign]
    place: str
    pid: int


class RankEntrance:
    """The leader's two sockets for ranks that it has not started."""

    def __init__(
        self,
        bus: BusConfig,
        group: str,
        places: Mapping[int, str],
        digest: GroupDigest,
        keys: KeyPair | None = None,
        accepts: Any = Answer,
    ) -> None:
        """places: of the ranks that are to join, in words. keys: instead of those of `bus`. accepts: the union of
        frames that they send."""
        self._sockets, self._places, self._digest = Sockets(bus, keys=keys), places, digest
        self._signs: FrameListener[RankJoin, Sign] = FrameListener(self._sockets, RankJoin, Sign, self._on_sign)
        self._commands: FrameListener[RankJoin, Any] = FrameListener(self._sockets, RankJoin, accepts, self._on_command)
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
