"""A rank that computes its share of what the leader sends, in the order in which it comes."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from blockyard.services.gpu_worker.arrays import Ints
from blockyard.services.gpu_worker.attention.cpu_metadata import CpuMetadataBuilder
from blockyard.services.gpu_worker.execution.ranks.expert_moves import MovableExperts
from blockyard.services.gpu_worker.interfaces import StoredLayers
from blockyard.services.gpu_worker.kv.pool import KVPool
from blockyard.services.gpu_worker.kv.pool_blocks import RankBlocks
from blockyard.services.gpu_worker.loading.weight_offload import OffloadedWeights
from blockyard.services.gpu_worker.lora.worker_adapters import WorkerAdapters
from blockyard.services.gpu_worker.models.interface import Model, tensors_of
from blockyard.services.gpu_worker.parallel.commands import (
    LAST_OUTPUT,
    AttentionCall,
    BeginExchange,
    Command,
    ComputeLogits,
    CopyBlocks,
    CountExperts,
    FetchBlocks,
    ForgetSequences,
    ForwardPass,
    ReclaimMemory,
    ReleaseMemory,
    SaveBlocks,
    ScrubBlocks,
    ServeExperts,
    SumExpertLoads,
    TradeExperts,
)
from blockyard.services.gpu_worker.parallel.replicas import ExpertExchange
from blockyard.services.gpu_worker.parallel.team import RankGroups
from blockyard.services.gpu_worker.step import Attend, InputVectors, Step
from blockyard.services.kv_transfer.host.host_store import BlockStore
from blockyard.shared.messages import Geometry


class FollowerNeeds(NamedTuple):
    """What forward passes of a follower need."""

    model: Model
    pool: KVPool
    ranks: RankGroups
    geometry: Geometry


class FollowerSteps(Protocol):
    """The forward passes of a follower on one kind of device."""

    @property
    def stored(self) -> Sequence[StoredLayers]:
        """All layers of the last step that records which are stored. Empty: none has."""

    def do(self, command: Command) -> None:
        """Does a command of a step. Raises AssertionError for any other."""

    def forget(self) -> None:
        """Drops what depends on the addresses of memory and on sequences."""


class CpuFollowerSteps:
    """Implements `FollowerSteps`."""

    stored: Sequence[StoredLayers] = ()  # a step is done before the next command is read

    def __init__(self, model: Model, pool: KVPool, ranks: RankGroups) -> None:
        self._model, self._ranks = model, ranks
        self._builder = CpuMetadataBuilder(pool, ranks.place.num_stages)
        self._hidden = torch.empty(0, 0)  # output of the last forward pass

    def forget(self) -> None:
        self._builder.clear()

    def do(self, command: Command) -> None:
        match command:
            case ForwardPass(attention, token_ids, positions, adapter_places):
                ids, places = (torch.from_numpy(_decoded(one)) for one in (token_ids, positions))
                adapted = torch.from_numpy(np.frombuffer(adapter_places, np.int32).copy()) if adapter_places else None
                self._model.adapter_rows.begin(adapted)
                step = Step(ids, places, self._attention(attention), vectors=self._vectors(command))
                self._hidden = self._model.forward(step)
            case ComputeLogits():
                compute_logits(self._model, self._ranks, self._hidden, command)
            case ForgetSequences():
                self.forget()
            case _:
                raise AssertionError(f"no command of a step on the CPU: {command}")

    def _vectors(self, command: ForwardPass) -> InputVectors | None:
        if not command.vectors:
            return None
        rows = torch.from_numpy(_decoded(command.vector_rows))
        values = torch.frombuffer(bytearray(command.vectors), dtype=self._model.table.dtype)
        return InputVectors(rows, values.view(len(rows), -1))

    def _attention(self, call: AttentionCall) -> Attend:
        counts = _decoded(call.counts)
        return self._builder.attention(
            _decoded(call.blocks),
            _decoded(call.offsets),
            _decoded(call.tables).reshape(len(counts), -1),
            counts,
            _decoded(call.lengths),
            _decoded(call.owners),
            call.num_decodes,
        )


def compute_logits(model: Model, ranks: RankGroups, last: Tensor, command: ComputeLogits) -> None:
    """Computes this rank's part of the logits of the last output, or of rows that the leader sends."""
    if command.num_rows == LAST_OUTPUT:
        model.logits(last)
        return
    assert ranks.tensor is not None
    hidden, places = last.new_empty(command.num_rows, last.shape[1]), None
    ranks.tensor.copy_from_leader(hidden)
    if command.has_adapters:
        places = torch.empty(command.num_rows, dtype=torch.int32, device=last.device)
        ranks.tensor.copy_from_leader(places)
    with model.adapter_rows.meanwhile(places):
        model.logits(hidden)


class Follower:
    """Has a share of the model and of each KV block. It keeps no state of sequences."""

    def __init__(
        self,
        model: Model,
        pool: KVPool,
        store: BlockStore | None,
        steps: FollowerSteps,
        adapters: WorkerAdapters | None = None,
        experts: MovableExperts | None = None,
    ) -> None:
        """store: host memory for blocks, None without --swap-space. adapters: of the model; None: it serves none.
        experts: that move; None: none does."""
        self.adapters = adapters
        self._model, self._pool, self._store, self._steps = model, pool, store, steps
        self._offloaded: OffloadedWeights | None = None
        self._experts = experts
        self.kv_memory = RankBlocks(pool)

    @property
    def stored(self) -> Sequence[StoredLayers]:
        """See `FollowerSteps`."""
        return self._steps.stored

    def do(self, command: Command) -> None:
        """Raises RankLostError if another rank is gone."""
        with torch.inference_mode():
            self._do(command)

    def _do(self, command: Command) -> None:
        match command:
            case CopyBlocks(pairs):
                self._pool.copy(_decoded(pairs).reshape(2, -1))
            case ScrubBlocks(blocks):
                self._pool.scrub(_decoded(blocks))
            case SaveBlocks(blocks, hosts):
                assert self._store is not None
                self._store.save(blocks, hosts)
            case FetchBlocks(hosts, blocks):
                assert self._store is not None
                self._store.fetch(hosts, blocks)
            case ReleaseMemory(weights):
                self._release(weights)
            case ReclaimMemory(weights, kv):
                self._reclaim(weights, kv)
            case BeginExchange(num_rows):
                self._exchange.num_rows = num_rows or None
            case ServeExperts():
                self._exchange.serve()
            case CountExperts() | SumExpertLoads() | TradeExperts():
                assert self._experts is not None
                self._experts.do(command)
            case _:
                self._steps.do(command)

    @property
    def _exchange(self) -> ExpertExchange:
        exchange = self._model.table.exchange
        assert exchange is not None, "this replica has all experts"
        return exchange

    def _release(self, weights: bool) -> None:
        self._steps.forget()
        if weights and self._offloaded is None:
            self._offloaded = OffloadedWeights(tensors_of(self._model))
        self._pool.drop()
        self._model.table.link.free_cached()

    def _reclaim(self, weights: bool, kv: bool) -> None:
        if weights and self._offloaded is not None:
            self._offloaded.restore()
            self._offloaded = None
        if kv:
            self._pool.restore()
            self._steps.forget()


def _decoded(numbers: bytes) -> Ints:
    return np.frombuffer(numbers, np.int64).copy()
