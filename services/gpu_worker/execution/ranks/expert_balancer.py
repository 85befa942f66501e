"""Decides which experts move to other ranks, by how often they were chosen lately. Only the leader does.

After each interval of steps all ranks sum their counts. Then experts of one layer move before each step, where the
fullest rank of the layer had too much. Leaders of replicas that have the experts together count the same steps and get
the same sums, so that they decide the same.
"""

import logging

import msgspec
import numpy as np
import torch

from blockyard.services.gpu_worker.arrays import Ints
from blockyard.services.gpu_worker.execution.ranks.expert_moves import ExpertCommand, MovableExperts
from blockyard.services.gpu_worker.parallel.commands import CountExperts, SumExpertLoads, TradeExperts
from blockyard.services.gpu_worker.parallel.expert_balance import (
    first_owners,
    fullest_to_mean,
    is_unbalanced,
    plan_trades,
)
from blockyard.services.gpu_worker.parallel.shares import WHOLE, Shard, share
from blockyard.services.gpu_worker.parallel.team import SendCommand
from blockyard.shared.config.services.worker import ExpertBalance
from blockyard.shared.messages import Stats

log = logging.getLogger(__name__)

Layer = tuple[int, int]  # stage, and number among its layers with experts


class ExpertBalancer:
    """Owns which rank has which expert, of all stages, and moves them."""

    def __init__(
        self, own: MovableExperts, config: ExpertBalance, send: SendCommand | None, replica: Shard = WHOLE
    ) -> None:
        """own: of the leader. send: to followers; None: there are none. replica: of those that have the experts."""
        self._own, self._config, self._send = own, config, send
        self._num_ranks = num_ranks = own.num_ranks
        self._of_replica = share(num_ranks, replica)  # ranks
        self._owners: dict[Layer, list[int]] = {
            (stage, layer): first_owners(num, num_ranks)
            for stage, nums in enumerate(own.num_experts)
            for layer, num in enumerate(nums)
        }
        self._waiting: dict[Layer, Ints] = {}  # loads of layers whose experts are to move
        self._steps = 0  # of the interval
        self._ratios: list[float] = []  # of the last interval: fullest rank to mean, by layer
        self._num_moved = 0  # to ranks of this replica

    def restart(self) -> None:
        """The steps of the interval so far were trial steps, which chose the same experts for all rows."""
        self._steps = 0

    @property
    def is_due(self) -> bool:
        """Whether `begin_step` does something beside counting: no step may be in flight then."""
        return bool(self._waiting) or self._steps + 1 in (self._first_counted, self._config.interval_steps + 1)

    @property
    def _first_counted(self) -> int:
        return self._config.interval_steps - self._config.window_steps + 1

    @torch.inference_mode()
    def begin_step(self) -> None:
        """Counts a step that is about to be launched, and does what is due before it. Raises RankLostError if another
        rank is gone."""
        self._steps += 1
        if self._steps > self._config.interval_steps:
            self._tell(SumExpertLoads())
            self._decide(self._own.sum_loads())
            self._steps = 1
        if self._steps == self._first_counted:
            self._do(CountExperts())
        if self._waiting:
            layer = next(iter(self._waiting))
            self._move(layer, self._waiting.pop(layer))

    def count(self, stats: Stats) -> Stats:
        """Returns the worker's counters with these."""
        ratios = [round(ratio, 4) for ratio in self._ratios]
        return msgspec.structs.replace(stats, expert_rank_loads=ratios, experts_moved_total=self._num_moved)

    def _decide(self, loads: list[list[Ints]]) -> None:
        found = [((stage, layer), one) for stage, some in enumerate(loads) for layer, one in enumerate(some)]
        self._ratios = [fullest_to_mean(one, self._owners[layer], self._num_ranks) for layer, one in found]
        self._waiting = {layer: one for layer, one in found if is_unbalanced(one, self._owners[layer], self._num_ranks)}
        if self._config.logs and self._ratios:
            log.info(
                "experts: the fullest rank had %.3f of the mean, %.3f in the worst of %d layers; to balance: %d",
                *(float(np.mean(self._ratios)), max(self._ratios), len(found), len(self._waiting)),
            )

    def _move(self, layer: Layer, loads: Ints) -> None:
        owners = self._owners[layer]
        trades = plan_trades(loads, owners, self._num_ranks)
        if not trades:
            return
        self._do(TradeExperts(*layer, trades))
        for one, other in trades:
            owners[one], owners[other] = owners[other], owners[one]
            self._num_moved += sum(owners[expert] in self._of_replica for expert in (one, other))

    def _do(self, command: ExpertCommand) -> None:
        self._tell(command)
        self._own.do(command)

    def _tell(self, command: ExpertCommand) -> None:
        if self._send is not None:
            self._send(command)
