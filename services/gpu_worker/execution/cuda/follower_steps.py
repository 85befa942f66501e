"""The forward passes of a follower with a GPU. Inputs come from the leader's GPU, CUDA graphs are captured as it does.

A follower keeps the block tables of slots, as the leader's host writes them. It samples nothing and advances no slot.
"""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import Tensor

from blockyard.kernels.kv_cache.paged_kv import PagedKVMetadata
from blockyard.kernels.slots.slot_state import SlotState
from blockyard.services.gpu_worker.arrays import Words
from blockyard.services.gpu_worker.attention.metadata import AttentionMetadata
from blockyard.services.gpu_worker.execution.cuda.device_ops import DeviceOps
from blockyard.services.gpu_worker.execution.device_slots import SLOTS
from blockyard.services.gpu_worker.execution.ranks.follower import compute_logits
from blockyard.services.gpu_worker.host_link import put
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
    ReplayGraph,
    ScatterWords,
)
from blockyard.services.gpu_worker.parallel.team import RankGroups
from blockyard.services.gpu_worker.step import InputVectors, LogitsIndices, Step
from blockyard.shared.messages import Geometry


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
        self._hidden = torch.empty(0, 0)  # output of the last forward pass
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._graph_pool: Any = None
        self._capture = ExitStack()  # of the graph that is captured

    def forget(self) -> None:
        self._graphs.clear()

    def do(self, command: Command) -> None:
        if self._ranks.tensor is not None:
            self._ranks.tensor.check()
        match command:
            case ReplayGraph(key):
                self._graphs[key].replay()
            case DeviceForward():
                self._hidden = self._forward(command)
            case ComputeLogits():
                compute_logits(self._model, self._ranks, self._hidden, command)
            case ScatterWords(index, values):
                pairs = np.frombuffer(index + values, np.int32).reshape(2, -1).copy()
                self._ops.scatter(self._state.arena, self._on_device(pairs), pairs.shape[1])
            case DropGraph(key):
                del self._graphs[key]
            case InstallKernels(tuned):
                assert self._install_kernels is not None
                self._install_kernels(tuned)
            case BeginGraph(key):
                self._begin(key)
            case EndGraph():
                self._capture.close()
            case _:
                raise AssertionError(f"no command of a step on a GPU: {command}")

    def _begin(self, key: int) -> None:
        if not self._graphs:  # torch takes no capture into a pool whose graphs have all been dropped
            self._graph_pool = torch.cuda.graph_pool_handle()
        torch.cuda.synchronize(self._pool.device)
        self._graphs[key] = graph = torch.cuda.CUDAGraph()
        capture = torch.cuda.graph(graph, pool=self._graph_pool, capture_error_mode="thread_local")
        self._capture.enter_context(capture)

    def _forward(self, command: DeviceForward) -> Tensor:
        num_tokens, num_logits = command.num_tokens, max(command.num_logits, 0)
        parts = [num_tokens] * 3 + [command.num_starts] + [num_logits] * 3 + [num_tokens * command.has_adapters]
        parts.append(command.num_tables * command.table_width)
        if command.words:
            words = self._on_device(np.frombuffer(command.words, np.int32).copy()).long()
        else:
            words = torch.empty(sum(parts), dtype=torch.int64, device=self._pool.device)
            self._ranks.everyone.copy_from_leader(words)
        vectors = self._vectors(command)
        token_ids, positions, slots, starts, *needed, places, tables = torch.split(words, parts)
        self._model.adapter_rows.begin(places.int() if command.has_adapters else None)
        metadata = AttentionMetadata(
            PagedKVMetadata(
                slots,
                positions,
                tables.int().view(-1, command.table_width) if command.num_tables else self._state.tables,
            ),
            query_start_loc=starts.int() if command.num_starts else None,
            num_decodes=command.num_decodes,
            max_seq_len=command.max_seq_len,
            prefill_max_seq_len=command.prefill_max_seq_len,
            max_context_len=command.max_context_len,
        )
        indices = None if command.num_logits < 0 else LogitsIndices(*needed)
        attend = self._ops.attend(self._pool, metadata)
        return self._model.forward(Step(token_ids, positions, attend, indices, vectors))

    def _vectors(self, command: DeviceForward) -> InputVectors | None:
        if not command.num_vectors:
            return None
        device, num = self._pool.device, command.num_vectors
        rows = torch.empty(num, dtype=torch.int64, device=device)
        values = torch.empty(num, command.vector_width, dtype=self._model.table.dtype, device=device)
        for one in (rows, values):
            self._ranks.everyone.copy_from_leader(one)
        return InputVectors(rows, values)

    def _on_device(self, words: Words) -> Tensor:
        """Does not wait for the device, which may be some steps behind."""
        return put(words, self._pool.device, self._model.table.link)
