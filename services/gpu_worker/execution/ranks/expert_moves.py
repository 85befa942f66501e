"""Moves experts between ranks, and sums how often they are chosen. All ranks do the same, in the order of commands."""

from collections.abc import Sequence

import numpy as np
import torch

from blockyard.services.gpu_worker.arrays import Ints
from blockyard.services.gpu_worker.layers.moe.expert_weights import ExpertProducts
from blockyard.services.gpu_worker.models.interface import Model
from blockyard.services.gpu_worker.parallel.commands import CountExperts, SumExpertLoads, TradeExperts
from blockyard.services.gpu_worker.parallel.rank_group import RankGroup
from blockyard.services.gpu_worker.parallel.replicas import ExpertExchange
from blockyard.services.gpu_worker.parallel.stages import place_of
from blockyard.services.gpu_worker.parallel.team import RankGroups
from blockyard.shared.config.services.worker import WorkerConfig

MOST_LAYERS = 512  # with experts, of a stage

ExpertCommand = CountExperts | SumExpertLoads | TradeExperts


class MovableExperts:
    """The layers with experts of this rank, which the ranks of its stage divide. Others are not counted as layers."""

    def __init__(self, experts: Sequence[ExpertProducts], ranks: RankGroups) -> None:
        """Collective of all ranks."""
        assert ranks.tensor is not None
        self._layers = [(one, one.places) for one in experts if one.places is not None]
        self._everyone, self._ranks, self._stage = ranks.everyone, ranks.tensor, ranks.place.stage
        place = ranks.place
        self._stages = [place_of(i, place.shard.size, place.num_stages).stage for i in range(place.num_ranks)]
        own = torch.zeros(MOST_LAYERS, dtype=torch.int64)
        own[: len(self._layers)] = torch.tensor([len(places.owners) for _, places in self._layers], dtype=torch.int64)
        sizes = [one[one > 0].tolist() for one in self._everyone.collect(own.to(self._everyone.device))]
        self.num_experts: list[list[int]] = [
            sizes[self._stages.index(stage)] for stage in range(place.num_stages)
        ]  # by stage and layer

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
        own = torch.zeros(max(sizes), dtype=torch.int64, device=self._everyone.device)
        if self._layers:
            own[: sizes[self._stage]] = torch.cat([places.loads for _, places in self._layers])
        parts = torch.stack(self._everyone.collect(own)).cpu().numpy()
        found = []
        for stage, some in enumerate(self.num_experts):
            summed = parts[[one == stage for one in self._stages]].sum(0)
            found.append(np.split(summed[: sum(some)], np.cumsum(some)[:-1]) if some else [])
        return found

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


def movable_experts(config: WorkerConfig, model: Model, ranks: RankGroups | None) -> MovableExperts | None:
    """Returns the experts of this rank that move. None: none does. Collective of all ranks."""
    if config.expert_balance is None or ranks is None or ranks.tensor is None:
        return None
    return MovableExperts(model.experts(), ranks)


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
