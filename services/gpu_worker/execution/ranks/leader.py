"""The parts of a leader's runner that tell followers what to compute before the leader computes it."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from blockyard.kernels.layers.rms_norm import RMSNorm
from blockyard.kernels.slots.slot_state import SlotState
from blockyard.services.gpu_worker.arrays import Ints, Words
from blockyard.services.gpu_worker.attention.cpu_metadata import CpuMetadataBuilder
from blockyard.services.gpu_worker.attention.metadata import AttentionMetadata
from blockyard.services.gpu_worker.execution.ranks.slot_changes import SentChanges
from blockyard.services.gpu_worker.host_link import DeviceEvent, HostLink
from blockyard.services.gpu_worker.kv.pool import KVPool
from blockyard.services.gpu_worker.layers.linear import Linear
from blockyard.services.gpu_worker.layers.moe.expert_weights import ExpertProducts
from blockyard.services.gpu_worker.models.interface import Model
from blockyard.services.gpu_worker.parallel.commands import (
    LAST_OUTPUT,
    AttentionCall,
    BeginGraph,
    ComputeLogits,
    CopyBlocks,
    DeviceForward,
    DropGraph,
    EndGraph,
    FetchBlocks,
    Followers,
    ForgetSequences,
    ForwardPass,
    InstallKernels,
    ReclaimMemory,
    ReleaseMemory,
    ReplayGraph,
    SaveBlocks,
    ScatterWords,
    ScrubBlocks,
)
from blockyard.services.gpu_worker.parallel.rank_group import RankGroup
from blockyard.services.gpu_worker.parallel.team import RankGroups, SendCommand
from blockyard.services.gpu_worker.step import Attend, LatentRows, LogitsIndices, Step
from blockyard.services.kv_transfer.host.host_store import BlockStore


class LeaderModel:
    """Implements `Model` for the leader's share. Its logits have the parts of all ranks."""

    def __init__(self, model: Model, ranks: RankGroups, send: SendCommand) -> None:
        self._model, self.ranks, self._send = model, ranks, send
        self.shape, self.table = model.shape, model.table
        self.adapter_rows, self.adaptable = model.adapter_rows, model.adaptable
        self._last: Tensor | None = None  # output of `forward`
        self._announced: deque[Step] = deque()  # earlier stages compute them, this one has not yet

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

    def announce(self, step: Step, adapter_places: Tensor | None) -> None:
        """Earlier stages compute a step on the CPU from now on. `forward` is called for the same steps in one order.

        adapter_places: see `AdapterRows.begin`.
        """
        self._announced.append(step)
        self._send(_forward_pass(step, adapter_places), Followers.EARLIER_STAGES)

    def forward(self, step: Step) -> Tensor:
        """`step.attend` is a `CalledAttend` or a `DeviceAttend`."""
        assert step.token_types is None, "followers get no token types"
        attend = step.attend
        if isinstance(attend, DeviceAttend):
            self._send(_device_forward(step, attend, has_adapters=self.adapter_rows.is_active))
            if step.vectors is not None:
                self.ranks.everyone.copy_from_leader(step.vectors.rows)
                self.ranks.everyone.copy_from_leader(step.vectors.values.contiguous())
            step = replace(step, attend=attend.attend)
        else:
            assert step.logits_indices is None, "steps on the CPU compute all rows"
            is_announced = bool(self._announced) and self._announced[0] is step
            if is_announced:
                self._announced.popleft()
            places = self.adapter_rows.places if self.adapter_rows.is_active else None
            self._send(_forward_pass(step, places), Followers.LAST_STAGE if is_announced else Followers.ALL)
        self._last = self._model.forward(step)
        return self._last

    def logits(self, hidden: Tensor) -> Tensor:
        """Followers get the rows: all ranks of the stage have the same hidden states, and only the leader knows which
        it samples."""
        if self.ranks.tensor is None:
            return self._model.logits(hidden)
        if hidden is self._last:
            self._send(ComputeLogits(LAST_OUTPUT), Followers.LAST_STAGE)
        else:
            self._send(ComputeLogits(len(hidden), self.adapter_rows.is_active), Followers.LAST_STAGE)
            hidden = hidden.contiguous()
            self.ranks.tensor.copy_from_leader(hidden)
            if self.adapter_rows.is_active:
                self.ranks.tensor.copy_from_leader(self.adapter_rows.places.contiguous())
        return self._model.logits(hidden)


def _forward_pass(step: Step, adapter_places: Tensor | None) -> ForwardPass:
    assert isinstance(step.attend, CalledAttend)
    places = b"" if adapter_places is None else adapter_places.numpy().tobytes()
    inputs = step.attend.call, step.token_ids.numpy().tobytes(), step.positions.numpy().tobytes(), places
    if step.vectors is None:
        return ForwardPass(*inputs)
    rows, values = step.vectors.rows, step.vectors.values.contiguous().view(torch.uint8)  # numpy has no bfloat16
    return ForwardPass(*inputs, rows.numpy().tobytes(), values.numpy().tobytes())


def _device_forward(step: Step, attend: "DeviceAttend", *, has_adapters: bool) -> DeviceForward:
    metadata, needed = attend.metadata, step.logits_indices
    starts = metadata.query_start_loc
    num_tables, table_width = metadata.rows.tables.shape if attend.has_tables else (0, 0)
    num_vectors, vector_width = (0, 0) if step.vectors is None else step.vectors.values.shape
    return DeviceForward(
        len(step.token_ids),
        attend.num_gathered,
        0 if starts is None else len(starts),
        -1 if needed is None else len(needed.rows),
        metadata.num_decodes,
        metadata.max_seq_len,
        metadata.prefill_max_seq_len,
        metadata.max_context_len,
        has_adapters,
        num_tables,
        table_width,
        attend.words,
        num_vectors,
        vector_width,
        attend.measures_scales,
        attend.records_layers,
    )


class CalledAttend:
    """Implements `Attend` on the CPU, with the arguments that it was built from."""

    def __init__(self, attend: Attend, call: AttentionCall) -> None:
        self._attend, self.call = attend, call

    def __call__(self, layer: int, qkv: Tensor, rotation: Tensor | None = None, norm: RMSNorm | None = None) -> Tensor:
        return self._attend(layer, qkv, rotation, norm)

    def latent(self, layer: int, query: Tensor, rotation: Tensor | None, latent: LatentRows) -> Tensor:
        return self._attend.latent(layer, query, rotation, latent)

    def of_rows(self, indices: LogitsIndices) -> Attend:
        return self._attend.of_rows(indices)


class DeviceAttend:
    """Implements `Attend` on a GPU, with what it was built from: followers build theirs of the same."""

    def __init__(
        self,
        attend: Attend,
        metadata: AttentionMetadata,
        num_gathered: int,
        words: bytes = b"",
        *,
        has_tables: bool = False,
        scales_pending: bool = False,
        records_layers: bool = False,
    ) -> None:
        """num_gathered, words, records_layers: see `DeviceForward`. has_tables: the block tables are not those of
        slots. scales_pending: see `KVPool`."""
        self.attend, self.metadata, self.has_tables = attend, metadata, has_tables
        self.records_layers = records_layers
        self.measures_scales = scales_pending and metadata.query_start_loc is not None
        self.num_gathered, self.words = num_gathered, words

    def __call__(self, layer: int, qkv: Tensor, rotation: Tensor | None = None, norm: RMSNorm | None = None) -> Tensor:
        return self.attend(layer, qkv, rotation, norm)

    def latent(self, layer: int, query: Tensor, rotation: Tensor | None, latent: LatentRows) -> Tensor:
        return self.attend.latent(layer, query, rotation, latent)

    def of_rows(self, indices: LogitsIndices) -> Attend:
        return self.attend.of_rows(indices)


class CheckedEvent:
    """The end of a step whose sums over ranks may have failed. Implements `DeviceEvent`."""

    def __init__(self, event: DeviceEvent, ranks: RankGroup) -> None:
        self._event, self._ranks = event, ranks

    def record(self) -> None:
        self._event.record()

    def query(self) -> bool:
        is_done = self._event.query()
        if is_done:
            self._ranks.check()
        return is_done

    def synchronize(self) -> None:
        self._event.synchronize()
        self._ranks.check()


class DeviceMirror:
    """Tells followers with GPUs of what a leader does to its slots and CUDA graphs."""

    def __init__(self, send: SendCommand, ranks: RankGroups, link: HostLink) -> None:
        """link: of the leader's device."""
        self._send, self._ranks, self._link, self._num_graphs = send, ranks, link, 0

    def checked(self, done: DeviceEvent) -> DeviceEvent:
        """Returns the event, which raises RankLostError where a step has got no sum."""
        return done if self._ranks.tensor is None else CheckedEvent(done, self._ranks.tensor)

    def send_changes(self, state: SlotState) -> SentChanges:
        """state: of the leader's slots."""
        return SentChanges(self._send, self._ranks, state, self._link)

    def scatter(self, index: Words, values: Words) -> None:
        self._send(ScatterWords(index.tobytes(), values.tobytes()))

    @contextmanager
    def capturing(self) -> Iterator[int]:
        """What the model computes is captured. Returns the key of the graph."""
        self._num_graphs += 1
        self._send(BeginGraph(self._num_graphs))
        try:
            yield self._num_graphs
        finally:
            self._send(EndGraph())

    def replay(self, key: int, words: bytes) -> None:
        self._send(ReplayGraph(key, words))

    def drop(self, key: int) -> None:
        self._send(DropGraph(key))

    def install_kernels(self, tuned: bytes) -> None:
        self._send(InstallKernels(tuned))


class LeaderMetadata:
    """Builds the attention of a step as `CpuMetadataBuilder` does. `LeaderModel` tells followers of it."""

    def __init__(self, pool: KVPool, send: SendCommand, num_batches: int = 1) -> None:
        """num_batches: see `CpuMetadataBuilder`."""
        self._builder, self._send = CpuMetadataBuilder(pool, num_batches), send

    def clear(self) -> None:
        self._send(ForgetSequences())
        self._builder.clear()

    def attention(
        self, blocks: Ints, offsets: Ints, tables: Ints, counts: Ints, lengths: Ints, owners: Ints, num_decodes: int
    ) -> CalledAttend:
        call = AttentionCall(
            _encoded(blocks),
            _encoded(offsets),
            _encoded(tables),
            _encoded(counts),
            _encoded(lengths),
            _encoded(owners),
            num_decodes,
        )
        attend = self._builder.attention(blocks, offsets, tables, counts, lengths, owners, num_decodes)
        return CalledAttend(attend, call)


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
