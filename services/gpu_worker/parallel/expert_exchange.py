"""What a rank exchanges with the ranks of other replicas, which have other experts of its layers.

A replica is a worker of --data-parallel-size with --enable-expert-parallel. Rank i of one exchanges rows with rank i of
the others: as the ranks of a replica have the same rows, all experts have seen all rows then.
"""

from typing import Protocol

from blockyard.services.gpu_worker.parallel.rank_group import RankGroup
from blockyard.services.gpu_worker.parallel.shares import Shard, over_replicas, share


class ServingLayer(Protocol):
    """A layer of experts."""

    def serve(self) -> None:
        """Computes rows of other replicas, in a step that has none here."""


class ExpertExchange:
    """The layers of a rank whose experts are spread over replicas, and what they know of a step."""

    def __init__(self, group: RankGroup, shard: Shard) -> None:
        """group: ranks with the same place in all replicas. shard: the place."""
        self.group, self._shard = group, shard
        self.num_rows: int | None = None  # of a step in each replica, with padding; None: as many as here
        self._layers: list[ServingLayer] = []

    def add(self, layer: ServingLayer) -> None:
        """Adds the layer behind those that there are."""
        self._layers.append(layer)

    def owned(self, num_experts: int) -> list[range]:
        """Returns which of a layer's experts each rank of the group has."""
        shards = (over_replicas(self._shard, Shard(i, self.group.size)) for i in range(self.group.size))
        return [share(num_experts, one) for one in shards]

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
