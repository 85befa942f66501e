"""Two replicas that have the experts together, with the steps of a GPU in plain torch: each is a thread."""

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Self

import torch
from rank_logits import CPU, load
from reference_ops import run_ahead

from blockyard.services.gpu_worker.execution.cuda.decode_graphs import (
    SAMPLE_VARIANTS,
    CapturedGraphs,
    DecodeSize,
    DecodeSteps,
    ForwardOutput,
)
from blockyard.services.gpu_worker.execution.ranks.expert_balancer import ExpertBalancer
from blockyard.services.gpu_worker.execution.ranks.expert_moves import MovableExperts
from blockyard.services.gpu_worker.kv.pool import KVPool
from blockyard.services.gpu_worker.parallel.meeting import Meeting
from blockyard.services.gpu_worker.parallel.rank_group import GroupStores, RankGroup, connect_cpus
from blockyard.services.gpu_worker.parallel.replicas import Connect, ExpertExchange, StepOffer
from blockyard.services.gpu_worker.parallel.shares import WHOLE, Shard
from blockyard.services.gpu_worker.runner import Runner
from blockyard.shared.config.services.worker import ExpertBalance
from blockyard.shared.messages import Geometry, Stats

CAPACITY = 16


class Recomputed:
    """In the place of a CUDA graph: computes again what was captured."""

    def __init__(self, compute: Callable[[], None]) -> None:
        self.replay = compute


def recomputed(decodes: DecodeSteps, size: DecodeSize, replayed: list[DecodeSize]) -> CapturedGraphs:
    output = ForwardOutput(
        torch.zeros(size.rows, decodes.model.embeddings()[0].shape[1]),
        torch.zeros(size.rows, decodes.model.shape.vocab_size),
    )

    def forward() -> None:
        replayed.append(size)
        found = decodes._forward(size)
        output.hidden.copy_(found.hidden)
        output.logits.copy_(found.logits)

    samples: list[Any] = [Recomputed(partial(decodes._sample, size.rows, output, edits)) for edits in SAMPLE_VARIANTS]
    return CapturedGraphs(Recomputed(forward), output, samples)


class QueuedOffers:
    """Implements `StepAgreement` of two."""

    def __init__(self, replica: int, inboxes: list[SimpleQueue[StepOffer]]) -> None:
        self._replica, self._inboxes = replica, inboxes
        self.agreed: list[list[StepOffer]] = []

    @property
    def is_called(self) -> bool:
        return not self._inboxes[self._replica].empty()

    def agree(self, offer: StepOffer) -> list[StepOffer]:
        self._inboxes[1 - self._replica].put(offer)
        both = [offer, self._inboxes[self._replica].get(timeout=30)]
        self.agreed.append(both[::-1] if self._replica else both)
        return self.agreed[-1]

    def connect(self, connect: Connect) -> RankGroup:
        raise NotImplementedError

    def connect_stage(self, connect: Connect, shard: Shard, stage: int) -> RankGroup:
        raise NotImplementedError


class TwoReplicas:
    """Each computes what it is given, then serves the other until that is done, too."""

    def __init__(
        self,
        folder: Path,
        group: Path,
        geometry: Geometry,
        graph_rows: Sequence[int] = (),
        balance: ExpertBalance | None = None,
    ) -> None:
        """graph_rows: sizes of decodes that have graphs. balance: of experts; None: they stay where they are."""
        self._graph_rows, self._balance = graph_rows, balance
        self.num_moved = [0, 0]  # experts that have come to a replica
        self.replayed: list[list[DecodeSize]] = [[], []]
        self._folder, self._group, self._geometry = folder, group, geometry
        inboxes = [SimpleQueue[StepOffer]() for _ in range(2)]
        self.offers = [QueuedOffers(i, inboxes) for i in range(2)]
        self._num_busy = 2
        self._lock = threading.Lock()
        self._problems: list[Exception] = []

    def run(self, first: Callable[[Runner], None], second: Callable[[Runner], None]) -> Self:
        threads = [threading.Thread(target=self._run, args=(i, do)) for i, do in enumerate((first, second))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert not self._problems and not any(thread.is_alive() for thread in threads)
        return self

    def _run(self, replica: int, do: Callable[[Runner], None]) -> None:
        try:
            runner = self._make(replica)
            do(runner)
            with self._lock:
                self._num_busy -= 1
            while self._num_busy or self.offers[replica].is_called:
                if not runner.join_step():
                    time.sleep(0.0005)
            self.num_moved[replica] = runner.count(Stats()).experts_moved_total
        except Exception as e:
            self._problems.append(e)
            raise

    def _make(self, replica: int) -> Runner:
        stores = GroupStores(Meeting(self._group))
        group, balancer = connect_cpus(Shard(replica, 2), stores, "replicas"), None
        exchange = ExpertExchange(group, WHOLE, group)
        model = load(self._folder, None, spread=True, exchange=exchange, moves=self._balance is not None)
        if self._balance is not None:
            experts = MovableExperts(model.experts(), None, exchange)
            balancer = ExpertBalancer(experts, self._balance, None, group.shard)
        pool = KVPool(model.shape, self._geometry.num_blocks, self._geometry.block_size, model.table.dtype, CPU)
        runner = Runner(model, pool, self._geometry, None, lambda runner: None, balancer=balancer)
        runner.share_experts(self.offers[replica])
        decodes = run_ahead(runner, CAPACITY, seed=replica, records_layers=False, masks=False).decodes
        for size in decodes.sizes:
            if size.rows in self._graph_rows:
                decodes._graphs[size] = recomputed(decodes, size, self.replayed[replica])
        return runner
