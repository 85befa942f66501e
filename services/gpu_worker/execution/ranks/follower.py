"""A rank that computes its share of what the leader sends, in the order in which it comes."""

import numpy as np
import torch

from blockyard.services.gpu_worker.arrays import Ints
from blockyard.services.gpu_worker.attention.cpu_metadata import CpuMetadataBuilder
from blockyard.services.gpu_worker.kv.pool import KVPool
from blockyard.services.gpu_worker.loading.weight_offload import OffloadedWeights
from blockyard.services.gpu_worker.models.interface import Model, tensors_of
from blockyard.services.gpu_worker.parallel.commands import (
    AttentionCall,
    Command,
    ComputeLogits,
    CopyBlocks,
    FetchBlocks,
    ForgetSequences,
    ForwardPass,
    ReclaimMemory,
    ReleaseMemory,
    SaveBlocks,
    ScrubBlocks,
)
from blockyard.services.gpu_worker.parallel.rank_group import RankGroup
from blockyard.services.gpu_worker.step import Attend, Step
from blockyard.services.kv_transfer.host.host_store import BlockStore


class Follower:
    """Has a share of the model and of each KV block. It keeps no state of sequences."""

    def __init__(self, model: Model, pool: KVPool, store: BlockStore | None, ranks: RankGroup) -> None:
        """store: host memory for blocks, None without --swap-space."""
        self._model, self._pool, self._store, self._ranks = model, pool, store, ranks
        self._builder = CpuMetadataBuilder(pool)
        self._attend: Attend | None = None
        self._hidden_size = model.embeddings()[0].shape[1]
        self._offloaded: OffloadedWeights | None = None

    def do(self, command: Command) -> None:
        """Raises RankLostError if another rank is gone."""
        with torch.inference_mode():
            self._do(command)

    def _do(self, command: Command) -> None:
        match command:
            case AttentionCall():
                self._attend = self._attention(command)
            case ForwardPass(token_ids, positions):
                assert self._attend is not None
                ids, places = (torch.from_numpy(_decoded(one)) for one in (token_ids, positions))
                self._hidden_size = self._model.forward(Step(ids, places, self._attend)).shape[1]
            case ComputeLogits(num_rows):
                hidden = torch.empty(num_rows, self._hidden_size, dtype=self._model.table.dtype)
                self._ranks.copy_from_leader(hidden)
                self._model.logits(hidden)
            case ForgetSequences():
                self._builder.clear()
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
            case _:
                raise AssertionError(f"no command of a running follower: {command}")

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

    def _release(self, weights: bool) -> None:
        if weights and self._offloaded is None:
            self._offloaded = OffloadedWeights(tensors_of(self._model))
        self._pool.drop()

    def _reclaim(self, weights: bool, kv: bool) -> None:
        if weights and self._offloaded is not None:
            self._offloaded.restore()
            self._offloaded = None
        if kv:
            self._pool.restore()
            self._builder.clear()


def _decoded(numbers: bytes) -> Ints:
    return np.frombuffer(numbers, np.int64).copy()
