"""How replicas that have the experts of a model together agree on each step, and exchange rows. Imports no torch.

A replica is a worker of --data-parallel-size with --enable-expert-parallel. Rank i of one exchanges rows with rank i of
the others: as the ranks of a replica have the same rows, all experts have seen all rows then.

All of them compute a step at the same time, because its rows go through the experts of all: as in vLLM's data-parallel
groups, one without rows of its own only serves those of others. Nobody computes while none has a row.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from blockyard.services.gpu_worker.parallel.meeting import Meeting
from blockyard.services.gpu_worker.parallel.shares import Shard, over_replicas
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

    def connect_stage(self, connect: Connect, shard: Shard, stage: int) -> "RankGroup":
        """Returns the group of all ranks of all replicas that have layers of a stage. shard: this one's in its
        replica."""


class StepAgreement(ReplicaPeers, Protocol):
    """The leaders of all replicas, as one of them sees them."""

    @property
    def is_called(self) -> bool:
        """Whether another replica has rows for the next step. Raises RankLostError if one is gone."""

    def agree(self, offer: StepOffer) -> list[StepOffer]:
        """Waits until all replicas have offered. Returns what they have, by replica. Raises RankLostError."""


class ReplicaRanks:
    """Implements `ReplicaPeers`."""

    def __init__(self, meeting: Meeting, replica: Shard, rank: int) -> None:
        """meeting: of all of them. replica: this one. rank: in its replica."""
        self._meeting, self._replica, self._rank = meeting, replica, rank
        self._groups: dict[str, RankGroup] = {}

    def connect(self, connect: Connect) -> "RankGroup":
        return self._connect(connect, self._replica, f"rank-{self._rank}")

    def connect_stage(self, connect: Connect, shard: Shard, stage: int) -> "RankGroup":
        return self._connect(connect, over_replicas(shard, self._replica), f"stage-{stage}")

    def _connect(self, connect: Connect, shard: Shard, name: str) -> "RankGroup":
        if name not in self._groups:
            self._groups[name] = connect(shard, self._meeting, name)
            self._meeting = replace(self._meeting, listener=None)  # the first group's store serves the others, too
        return self._groups[name]


class ServingLayer(Protocol):
    """A layer of experts."""

    def serve(self) -> None:
        """Computes rows of other replicas, in a step that has none here."""


class ExpertExchange:
    """The layers of a rank whose experts are spread over replicas, and what they know of a step."""

    def __init__(self, group: "RankGroup", shard: Shard, of_stage: "RankGroup | None" = None) -> None:
        """group: ranks with the same place in all replicas. shard: the place. of_stage: all ranks that have experts of
        the same layers, by `over_replicas`, if experts move."""
        self.group, self.of_stage, self._shard = group, of_stage, shard
        self.num_rows: int | None = None  # of a step in each replica, with padding; None: as many as here
        self._layers: list[ServingLayer] = []

    def add(self, layer: ServingLayer) -> None:
        """Adds the layer behind those that there are."""
        self._layers.append(layer)

    @property
    def owners(self) -> list[int]:
        """The ranks of the group, among all that have experts of a layer."""
        return [over_replicas(self._shard, Shard(i, self.group.size)).rank for i in range(self.group.size)]

    def sends_rows(self, top_k: int) -> bool:
        """Whether a row goes only to the ranks that have one of its `top_k` experts, and not to all.

        With so few ranks nearly all rows go to all of them. The host reads how many rows go where, so that a CUDA graph
        cannot.
        """
        if self.group.is_alone or self.group.shares_gpu or self.num_rows is None:
            return False
        return self.group.size > top_k

    def serve(self) -> None:
        """Takes part in a step of other replicas that has no rows here."""
        for layer in self._layers:
            layer.serve()
