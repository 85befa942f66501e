"""Carries the rows of a step from a pipeline stage to the next, between ranks with the same shard."""

from collections import deque

import torch
from torch import Tensor

from blockyard.services.gpu_worker.parallel.collectives import PendingCollective
from blockyard.services.gpu_worker.parallel.rank_group import RankGroup
from blockyard.services.gpu_worker.parallel.stages import RankPosition, rank_at


class StageLink:
    """One rank's end. A stage receives each step once, but for the first, and sends it once, but for the last."""

    def __init__(self, everyone: RankGroup, place: RankPosition) -> None:
        """everyone: all ranks of the worker."""
        self.is_first, self.is_last = place.stage == 0, place.stage == place.num_stages - 1
        self._everyone, self._most_sent = everyone, place.num_stages if everyone.host_waits else 0
        self._before, self._behind = rank_at(place, place.stage - 1), rank_at(place, place.stage + 1)
        # perhaps not taken yet: gloo sends nothing more after one that was given up
        self._sent: deque[tuple[PendingCollective, Tensor]] = deque()

    def receive(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """Waits for the rows of the stage before."""
        hidden = torch.empty(num_rows, width, dtype=dtype, device=self._everyone.device)
        if self._everyone.is_alone:
            return hidden.zero_()
        self._everyone.receive(hidden, self._before)
        return hidden

    def send(self, hidden: Tensor) -> None:
        """Sends rows that nobody changes from here on. Waits only if the next stage is several steps behind."""
        if self._everyone.is_alone:
            return
        hidden = hidden.contiguous()
        self._sent.append((self._everyone.send(hidden, self._behind), hidden))
        while len(self._sent) > self._most_sent:
            self._everyone.wait(self._sent.popleft()[0])
