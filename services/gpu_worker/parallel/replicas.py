"""How replicas that have the experts of a model together agree on each step. Imports no torch.

All of them compute a step at the same time, because its rows go through the experts of all: as in vLLM's data-parallel
groups, one without rows of its own only serves those of others. Nobody computes while none has a row.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from blockyard.services.gpu_worker.parallel.meeting import Meeting
from blockyard.services.gpu_worker.parallel.shares import Shard
from blockyard.shared.messages.base import Frame

if TYPE_CHECKING:
    from blockyard.services.gpu_worker.parallel.rank_group import RankGroup

Connect = Callable[[Shard, Meeting, str], "RankGroup"]


class StepOffer(Frame, frozen=True):
    """What a replica has for the next step."""

    num_rows: int  # tokens that it computes; 0: it only serves
    is_decode: bool  # it computes a token of each sequence, or none, and can pad its rows


class ReplicaPeers(Protocol):
    """The ranks with the same place in all replicas, as one of them sees them."""

    def connect(self, connect: Connect) -> "RankGroup":
        """Returns their group. Waits for the others the first time. Raises RankLostError."""


class StepAgreement(ReplicaPeers, Protocol):
    """The leaders of all replicas, as one of them sees them."""

    @property
    def is_called(self) -> bool:
        """Whether another replica has rows for the next step. Raises RankLostError if one is gone."""

    def agree(self, offer: StepOffer) -> list[StepOffer]:
        """Waits until all replicas have offered. Returns what they have, by replica. Raises RankLostError."""


class ReplicaRanks:
    """Implements `ReplicaPeers`."""

    def __init__(self, folder: Path, replica: Shard, rank: int) -> None:
        """folder: where all of them meet. replica: this one. rank: in its replica."""
        self._folder, self._replica, self._rank = folder, replica, rank
        self._group: RankGroup | None = None

    def connect(self, connect: Connect) -> "RankGroup":
        if self._group is None:
            self._group = connect(self._replica, Meeting(self._folder), f"rank-{self._rank}")
        return self._group
