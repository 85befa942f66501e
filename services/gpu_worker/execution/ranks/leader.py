"""The parts of a leader's runner that tell followers what to compute before the leader computes it."""

import numpy as np
from torch import Tensor

from blockyard.services.gpu_worker.arrays import Ints
from blockyard.services.gpu_worker.attention.cpu_metadata import CpuMetadataBuilder
from blockyard.services.gpu_worker.kv.pool import KVPool
from blockyard.services.gpu_worker.layers.linear import Linear
from blockyard.services.gpu_worker.layers.moe.expert_weights import ExpertProducts
from blockyard.services.gpu_worker.models.interface import Model
from blockyard.services.gpu_worker.parallel.commands import (
    AttentionCall,
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
from blockyard.services.gpu_worker.parallel.team import SendCommand
from blockyard.services.gpu_worker.step import Attend, Step
from blockyard.services.kv_transfer.host.host_store import BlockStore


class LeaderModel:
    """Implements `Model` for the leader's share. Its logits have the parts of all ranks."""

    def __init__(self, model: Model, ranks: RankGroup, send: SendCommand) -> None:
        self._model, self._ranks, self._send = model, ranks, send
        self.shape, self.table = model.shape, model.table

    def prepare(self, max_model_len: int) -> list[str]:
        return self._model.prepare(max_model_len)

    def linears(self) -> list[Linear]:
        return self._model.linears()

    def experts(self) -> list[ExpertProducts]:
        return self._model.experts()

    def embeddings(self) -> list[Tensor]:
        return self._model.embeddings()

    def computed(self) -> list[Tensor]:
        return self._model.computed()

    def forward(self, step: Step) -> Tensor:
        """`step.attend` is of `LeaderMetadata`, which has told followers of it."""
        assert step.vectors is None and step.logits_indices is None and step.token_types is None
        self._send(ForwardPass(step.token_ids.numpy().tobytes(), step.positions.numpy().tobytes()))
        return self._model.forward(step)

    def logits(self, hidden: Tensor) -> Tensor:
        """Followers get the rows: all ranks have the same hidden states, and only the leader knows which it samples."""
        self._send(ComputeLogits(len(hidden)))
        hidden = hidden.contiguous()
        self._ranks.copy_from_leader(hidden)
        return self._model.logits(hidden)


class LeaderMetadata:
    """Builds the attention of a step as `CpuMetadataBuilder` does."""

    def __init__(self, pool: KVPool, send: SendCommand) -> None:
        self._builder, self._send = CpuMetadataBuilder(pool), send

    def clear(self) -> None:
        self._send(ForgetSequences())
        self._builder.clear()

    def attention(
        self, blocks: Ints, offsets: Ints, tables: Ints, counts: Ints, lengths: Ints, owners: Ints, num_decodes: int
    ) -> Attend:
        self._send(
            AttentionCall(
                _encoded(blocks),
                _encoded(offsets),
                _encoded(tables),
                _encoded(counts),
                _encoded(lengths),
                _encoded(owners),
                num_decodes,
            )
        )
        return self._builder.attention(blocks, offsets, tables, counts, lengths, owners, num_decodes)


class LeaderStore:
    """Implements `BlockStore`: each rank has its part of a block in its own host memory."""

    def __init__(self, store: BlockStore, send: SendCommand) -> None:
        self._store, self._send = store, send

    def save(self, blocks: list[int], hosts: list[int]) -> None:
        self._send(SaveBlocks(blocks, hosts))
        self._store.save(blocks, hosts)

    def fetch(self, hosts: list[int], blocks: list[int]) -> None:
        self._send(FetchBlocks(hosts, blocks))
        self._store.fetch(hosts, blocks)

    def drain(self) -> None:
        """A follower copies blocks in the order of commands."""
        self._store.drain()


class LeaderPool:
    """Implements `PoolMirror`: changes of the KV memory beside steps."""

    def __init__(self, send: SendCommand) -> None:
        self._send = send

    def copy(self, pairs: Ints) -> None:
        self._send(CopyBlocks(_encoded(pairs)))

    def scrub(self, blocks: Ints) -> None:
        self._send(ScrubBlocks(_encoded(blocks)))

    def release(self, weights: bool) -> None:
        self._send(ReleaseMemory(weights))

    def reclaim(self, weights: bool, kv: bool) -> None:
        self._send(ReclaimMemory(weights, kv))


def _encoded(numbers: Ints) -> bytes:
    return np.ascontiguousarray(numbers, np.int64).tobytes()
