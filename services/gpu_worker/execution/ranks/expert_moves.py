"""Moves experts between ranks, and sums how often they are chosen. All ranks do the same, in the order of commands."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from blockyard.services.gpu_worker.arrays import Ints
from blockyard.services.gpu_worker.layers.moe.expert_weights import ExpertProducts
from blockyard.services.gpu_worker.models.interface import Model
from blockyard.services.gpu_worker.parallel.commands import CountExperts, SumExpertLoads, TradeExperts
from blockyard.services.gpu_worker.parallel.rank_group import RankGroup
from blockyard.services.gpu_worker.parallel.replicas import ExpertExchange
from blockyard.services.gpu_worker.parallel.stages import ONLY_RANK, place_of
from blockyard.services.gpu_worker.parallel.team import RankGroups
from blockyard.shared.config.services.worker import WorkerConfig

MOST_LAYERS = 512  # with experts, of a stage

ExpertCommand = CountExperts | SumExpertLoads | TradeExperts


class MovableExperts:
    """The layers with experts of this rank, which the ranks of its stage divide. Others are not counted as layers.

    With replicas that have the experts together, these are the ranks of all of them.
    """

    def __init__(
        self, experts: Sequence[ExpertProducts], ranks: RankGroups | None, exchange: ExpertExchange | None = None
    ) -> None:
        """Collective of all ranks. ranks: None: this is the only one of its replica. exchange: with other replicas."""
        self._layers = [(one, one.places) for one in experts if one.places is not None]
        group = exchange.of_stage if exchange is not None else None if ranks is None else ranks.tensor
        assert group is not None
        self._ranks, self._across = group, None if exchange is None else exchange.group
        self._everyone, place = None if ranks is None else ranks.everyone, ONLY_RANK if ranks is None else ranks.place
        self._stage = place.stage
        self._stages = [place_of(i, place.shard.size, place.num_stages).stage for i in range(place.num_ranks)]
        own = torch.zeros(MOST_LAYERS, dtype=torch.int64)
        own[: len(self._layers)] = torch.tensor([len(places.owners) for _, places in self._layers], dtype=torch.int64)
        sizes = [one[one > 0].tolist() for one in self._of_replica(own.to(group.device))]
        self.num_experts: list[list[int]] = [
            sizes[self._stages.index(stage)] for stage in range(place.num_stages)
        ]  # by stage and layer

    @property
    def num_ranks(self) -> int:
        """That divide the experts of a layer."""
        return self._ranks.size

    def do(self, command: ExpertCommand) -> None:
        match command:
            case CountExperts():
                self.count()
            case SumExpertLoads():
                self.sum_loads()
            case TradeExperts(stage, layer, pairs):
                if stage == self._stage:
                    self._trade(layer, pairs)

    def count(self) -> None:
        """Counts from here on how often experts are chosen."""
        for _, places in self._layers:
            places.loads.zero_()

    def sum_loads(self) -> list[list[Ints]]:
        """Returns for each stage and layer how often each expert was chosen since `count`, summed over its ranks.

        Collective of all ranks.
        """
        sizes = [sum(some) for some in self.num_experts]
        own = torch.zeros(max(sizes), dtype=torch.int64, device=self._ranks.device)
        if self._layers:
            own[: sizes[self._stage]] = torch.cat([places.own_loads() for _, places in self._layers])
        if self._across is not None:
            own = self._across.gather(own).sum(0)
        parts = torch.stack(self._of_replica(own)).cpu().numpy()
        found = []
        for stage, some in enumerate(self.num_experts):
            summed = parts[[one == stage for one in self._stages]].sum(0)
            found.append(np.split(summed[: sum(some)], np.cumsum(some)[:-1]) if some else [])
        return found

    def _of_replica(self, own: Tensor) -> list[Tensor]:
        """Returns what each rank of this replica has."""
        return [own] if self._everyone is None else self._everyone.collect(own)

    def _trade(self, layer: int, pairs: Sequence[tuple[int, int]]) -> None:
        experts, places = self._layers[layer]
        for pair in pairs:
            owners = [places.owners[expert] for expert in pair]
            if self._ranks.rank in owners:
                side = owners.index(self._ranks.rank)
                self._exchange(experts, places.place_of(pair[side]), owners[1 - side])
            places.trade(pair)
        places.install()

    def _exchange(self, experts: ExpertProducts, place: int, peer: int) -> None:
        """Replaces the expert at a place by that of another rank, which gets it."""
        for weight in experts.weights_at(place):
            own = [one.to(self._ranks.device).contiguous() for one in weight.contents()]
            weight.write(self._ranks.exchange(own, peer))


def movable_experts(
    config: WorkerConfig, model: Model, ranks: RankGroups | None, exchange: ExpertExchange | None
) -> MovableExperts | None:
    """Returns the experts of this rank that move. None: none does. Collective of all ranks. exchange: see
    `MovableExperts`."""
    is_alone = exchange is None and (ranks is None or ranks.tensor is None)
    if config.expert_balance is None or is_alone:
        return None
    return MovableExperts(model.experts(), ranks, exchange)


def agree_on_numbers(experts: Sequence[ExpertProducts], *groups: RankGroup | None) -> None:
    """Numbers that hold for all experts of a layer are those of all ranks' experts: the largest one counts.

    Collective. groups: of ranks that have experts of the layers; None: there is one rank.
    """
    for group in groups:
        if group is None:
            continue
        for one in experts:
            for number in one.numbers() if one.places is not None else ():
                number.copy_(group.largest(number.to(group.device)))


def describe_spread(
    config: WorkerConfig, model: Model, ranks: RankGroups | None, exchange: ExpertExchange | None = None
) -> list[str]:
    """Returns a line if --enable-expert-parallel has no effect."""
    are_several = exchange is not None or (ranks is not None and ranks.tensor is not None)
    if not config.expert_parallel or (are_several and model.experts()):
        return []
    what = "there is one rank" if model.experts() else "this model has none"
    return [f"--enable-expert-parallel spreads no experts: {what}"]
