"""What the start of a worker with several ranks knows of them: an interface for the leader and for followers."""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from blockyard.services.gpu_worker.parallel.rank_group import RankGroup
from blockyard.services.gpu_worker.parallel.shares import Shard
from blockyard.shared.messages.base import Frame

Connect = Callable[[Shard, Path], RankGroup]


class SendCommand(Protocol):
    """Sends a frame of `commands` to all followers. Raises RankLostError if one is gone."""

    def __call__(self, frame: Frame) -> None: ...


class RankTeam(Protocol):
    """All ranks of a worker, as one of them sees them."""

    @property
    def shard(self) -> Shard: ...

    @property
    def folder(self) -> Path:
        """Private to the group. Beside it are those of other workers of the host."""

    @property
    def send(self) -> SendCommand | None:
        """None: this rank is a follower."""

    def connect(self, connect: Connect) -> RankGroup:
        """Returns the group. The leader calls it once the settings are checked: followers load from then on."""
