"""The forward passes of a follower with a GPU. CUDA graphs are captured as the leader does.

A follower has the slots that the leader has: what the leader's host writes, and behind a step what that has changed of
them. It samples nothing and advances no slot.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from blockyard.kernels.int_math import wrap_int32
from blockyard.kernels.kv_cache.paged_kv import PagedKVMetadata
from blockyard.kernels.slots.slot_state import SlotState, StepInputs
from blockyard.services.gpu_worker.arrays import Words
from blockyard.services.gpu_worker.attention.metadata import AttentionMetadata
from blockyard.services.gpu_worker.execution.cuda.decode_graphs import begin_adapters
from blockyard.services.gpu_worker.execution.cuda.device_ops import DeviceOps
from blockyard.services.gpu_worker.execution.cuda.graph_pool import GraphPool
from blockyard.services.gpu_worker.execution.cuda.stored_layers import LayerWords, layer_groups
from blockyard.services.gpu_worker.execution.device_slots import SLOTS
from blockyard.services.gpu_worker.execution.ranks.follower import compute_logits
from blockyard.services.gpu_worker.execution.ranks.slot_changes import ReceivedChanges
from blockyard.services.gpu_worker.host_link import put
from blockyard.services.gpu_worker.interfaces import StoredLayers
from blockyard.services.gpu_worker.kv.pool import KVPool
from blockyard.services.gpu_worker.memory import blocks_of
from blockyard.services.gpu_worker.models.interface import Model
from blockyard.services.gpu_worker.parallel.commands import (
    BeginGraph,
    Command,
    ComputeLogits,
    DeviceForward,
    DropGraph,
    EndGraph,
    InstallKernels,
    ReceiveChanges,
    ReplayGraph,
    ScatterWords,
    TakeChanges,
)
from blockyard.services.gpu_worker.parallel.team import RankGroups
from blockyard.services.gpu_worker.step import Attend, InputVectors, LogitsIndices, Step
from blockyard.shared.messages import Geometry


@dataclass(slots=True)
class FollowerGraph:
    """A forward pass that is captured."""

    graph: torch.cuda.CUDAGraph
    words: Tensor  # its input
    records_layers: bool = False


class DeviceFollowerSteps:
    """Implements `FollowerSteps`."""

    def __init__(
        self,
        model: Model,
        pool: KVPool,
        ranks: RankGroups,
        geometry: Geometry,
        ops: DeviceOps,
        install_kernels: Callable[[bytes], None] | None = None,
    ) -> None:
        """install_kernels: takes those that the leader has measured; None: it measures none."""
        self._model, self._pool, self._ranks, self._ops = model, pool, ranks, ops
        self._install_kernels = install_kernels
        width = blocks_of(geometry.max_model_len, geometry.block_size)
        self._state = SlotState.make(SLOTS * geometry.max_num_seqs, geometry.max_num_seqs, width, pool.device)
        self._inputs = StepInputs.make(geometry.max_num_seqs, pool.device)
        self._changes = ReceivedChanges(ranks, geometry.max_num_seqs, model.table.link, self._write_changes)
        self._hidden = torch.empty(0, 0)  # output of the last forward pass
        self._graphs: dict[int, FollowerGraph] = {}
        self._graph_pool = GraphPool()
        self._captured: FollowerGraph | None = None  # the graph that is captured
        self.stored: Sequence[StoredLayers] = ()
        self._num_recorded = 0  # steps that record layers
        self._number = torch.zeros(1, dtype=torch.int32, device=pool.device)  # the one that runs, of these
        groups = layer_groups(pool.shape.num_layers)
        self._layer_words = LayerWords(groups, ops, self._number, model.table.link)
        self._capture = ExitStack()

    def forget(self) -> None:
        self._changes.clear()
        self._graphs.clear()
        self.stored = ()

    def do(self, command: Command) -> None:
        if self._ranks.tensor is not None:
            self._ranks.tensor.check()
        match command:
            case DeviceForward():
                self._hidden = self._forward(command)
            case ComputeLogits():
                compute_logits(self._model, self._ranks, self._hidden, command)
            case ScatterWords(index, values):
                pairs = np.frombuffer(index + values, np.int32).reshape(2, -1).copy()
                self._ops.scatter(self._state.arena, self._on_device(pairs), pairs.shape[1])
            case ReceiveChanges(num_rows):
                self._changes.receive(num_rows)
            case TakeChanges(count):
                self._changes.take(count)
            case InstallKernels(tuned):
                assert self._install_kernels is not None
                self._install_kernels(tuned)
            case _:
                self._do_with_graph(command)

    def _do_with_graph(self, command: Command) -> None:
        match command:
            case ReplayGraph(key, words):
                graph = self._graphs[key]
                assert len(words) == graph.words.nbytes, "a graph was replayed with the words of another step"
                if words:
                    graph.words.copy_(self._on_device(np.frombuffer(words, np.int32).copy()))
                if graph.records_layers:
                    self._count_recorded()
                graph.graph.replay()
            case BeginGraph(key):
                self._begin(key)
            case EndGraph():
                self._capture.close()
                self._captured = None
            case DropGraph(key):
                del self._graphs[key]
            case _:
                raise AssertionError(f"no command of a step on a GPU: {command}")

    def _begin(self, key: int) -> None:
        torch.cuda.synchronize(self._pool.device)
        self._graphs[key] = self._captured = captured = FollowerGraph(torch.cuda.CUDAGraph(), torch.empty(0))
        self._capture.enter_context(self._graph_pool.capturing(captured.graph))

    def _forward(self, command: DeviceForward) -> Tensor:
        num_logits, num_sent = max(command.num_logits, 0), command.num_tokens - command.num_gathered
        sizes = [num_sent] * 3 + [command.num_starts, num_logits, num_logits, command.num_tables * command.table_width]
        words = self._words(command.words, sum(sizes))
        vectors = self._vectors(command)
        *sent, starts, rows, last, tables = torch.split(words, sizes)
        starts, tables = starts.clone(), tables.clone()  # kernels are compiled again for other alignments
        token_ids, positions, slots = self._tokens(command.num_gathered, [one.long() for one in sent])
        begin_adapters(self._model, self._state, slots if command.has_adapters else None)
        metadata = AttentionMetadata(
            PagedKVMetadata(
                slots,
                positions,
                tables.view(-1, command.table_width) if command.num_tables else self._state.tables,
            ),
            query_start_loc=starts if command.num_starts else None,
            num_decodes=command.num_decodes,
            max_seq_len=command.max_seq_len,
            prefill_max_seq_len=command.prefill_max_seq_len,
            max_context_len=command.max_context_len,
        )
        needed = None
        if command.num_logits >= 0:
            owners = F.pad(slots, (0, 1), value=-1)  # the token behind all others is of no slot
            last = last.long()
            needed = LogitsIndices(rows.long(), owners[last], F.pad(positions, (0, 1))[last])
        self._pool.scales_pending = command.measures_scales  # the leader knows which steps serve no request
        attend = self._ops.attend(self._pool, metadata)
        if command.records_layers:
            attend = self._recorded(attend)
        return self._model.forward(Step(token_ids, positions, attend, needed, vectors))

    def _recorded(self, attend: Attend) -> Attend:
        if self._captured is None:
            self._count_recorded()
        else:
            self._captured.records_layers = True
        return self._layer_words.around(attend)

    def _count_recorded(self) -> None:
        """The step that is launched next records its layers."""
        self._num_recorded += 1
        self._number.fill_(wrap_int32(self._num_recorded))
        self.stored = self._layer_words.stored(self._num_recorded)

    def _words(self, words: bytes, count: int) -> Tensor:
        """Returns the words of a forward pass; those of a graph are given to it before each run."""
        if self._captured is None:
            return self._on_device(np.frombuffer(words, np.int32).copy())
        self._captured.words = torch.empty(count, dtype=torch.int32, device=self._pool.device)
        return self._captured.words

    def _tokens(self, num_gathered: int, sent: list[Tensor]) -> list[Tensor]:
        """Returns ids, positions and slots of all tokens. sent: those of tokens that are not gathered."""
        if not num_gathered:
            return sent
        inputs = self._inputs.first(num_gathered)
        self._ops.gather_inputs(self._state, inputs)
        gathered = [inputs.token_ids, inputs.positions, inputs.slots]
        return [torch.cat(both) for both in zip(gathered, sent, strict=True)] if len(sent[0]) else gathered

    def _vectors(self, command: DeviceForward) -> InputVectors | None:
        if not command.num_vectors:
            return None
        device, num = self._pool.device, command.num_vectors
        rows = torch.empty(num, dtype=torch.int64, device=device)
        values = torch.empty(num, command.vector_width, dtype=self._model.table.dtype, device=device)
        for one in (rows, values):
            self._ranks.everyone.copy_from_leader(one)
        return InputVectors(rows, values)

    def _write_changes(self, changes: Tensor) -> None:
        self._ops.write_changes(self._state, changes)

    def _on_device(self, words: Words) -> Tensor:
        """Does not wait for the device, which may be some steps behind."""
        return put(words, self._pool.device, self._model.table.link)
