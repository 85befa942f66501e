"""What the start of a worker with several ranks knows of them: an interface for the leader and for followers."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from blockyard.services.gpu_worker.parallel.commands import AdapterRead, Followers
from blockyard.services.gpu_worker.parallel.meeting import Meeting
from blockyard.services.gpu_worker.parallel.rank_group import GroupStores, RankGroup
from blockyard.services.gpu_worker.parallel.shares import Shard
from blockyard.services.gpu_worker.parallel.stage_link import StageLink
from blockyard.services.gpu_worker.parallel.stages import RankPosition
from blockyard.shared.errors import LoadError
from blockyard.shared.messages.base import Frame


class SendCommand(Protocol):
    """Sends a frame of `commands` to followers. Raises RankLostError if one is gone."""

    def __call__(self, frame: Frame, to: Followers = Followers.ALL) -> None: ...


@dataclass(frozen=True, slots=True)
class RankGroups:
    """The groups of ranks that one of them is in."""

    place: RankPosition
    everyone: RankGroup  # all ranks of the worker
    tensor: RankGroup | None  # of the same stage, which share its layers; None: there is one
    beside_steps: RankGroup | None = None  # all ranks, for what no step waits for; None: the CPU computes the steps

    @property
    def stage_link(self) -> StageLink | None:
        """None: there is one stage."""
        return None if self.place.num_stages == 1 else StageLink(self.everyone, self.place)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Trial steps of this rank: see `RankGroup.alone`."""
        with self.everyone.alone():
            if self.tensor is None or self.tensor is self.everyone:
                yield
                return
            with self.tensor.alone():
                yield


Connect = Callable[[RankPosition, Meeting], RankGroups]


class RankTeam(Protocol):
    """All ranks of a worker, as one of them sees them."""

    @property
    def place(self) -> RankPosition: ...

    @property
    def folder(self) -> Path:
        """Private to the ranks of this host. Beside it are those of other workers of the host."""

    @property
    def send(self) -> SendCommand | None:
        """None: this rank is a follower."""

    def divide(self, decide: Callable[[], list[int]]) -> list[int]:
        """Returns the number of layers of each stage: what the leader decides, and tells with `connect`."""

    @property
    def followers(self) -> Sequence[int]:
        """Their ranks; of a follower none."""

    def take_adapter_answers(self) -> list[tuple[int, AdapterRead]]:
        """See `AdapterFollowers`."""

    def connect(self, connect: Connect) -> RankGroups:
        """Returns the groups. The leader calls it once the settings are checked: followers load from then on."""


@contextmanager
def naming_leader(team: RankTeam | None) -> Iterator[None]:
    """A LoadError of a leader names its rank, as it does those of followers."""
    try:
        yield
    except LoadError as e:
        if team is None or team.send is None:
            raise
        raise LoadError(f"rank {team.place.rank}: {e}") from e


def connect_groups(
    make: Callable[[Shard, GroupStores, str], RankGroup], place: RankPosition, meeting: Meeting, *, runs_ahead: bool
) -> RankGroups:
    """Waits for the other ranks. make: makes the group of a name. runs_ahead: of the host, steps do. Raises
    RankLostError."""
    stores, of_all = GroupStores(meeting), Shard(place.rank, place.num_ranks)
    everyone, tensor = make(of_all, stores, "ranks"), None
    beside_steps = make(of_all, stores, "beside-steps") if runs_ahead else None
    if place.num_stages == 1:
        tensor = everyone
    elif place.shard.size > 1:
        tensor = make(place.shard, stores, f"stage-{place.stage}")
    if beside_steps is not None:
        for group in (everyone, beside_steps):
            group.least(0)  # NCCL takes its memory with the first collective, and KV blocks take what is left
    return RankGroups(place, everyone, tensor, beside_steps)
