"""A model without KV on several ranks: the leader tells followers of each step, and pools what all have computed."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from blockyard.services.gpu_worker.arrays import Ints
from blockyard.services.gpu_worker.attention.packed_attention import PackedAttention, PackedProduct
from blockyard.services.gpu_worker.interfaces import StoredLayers
from blockyard.services.gpu_worker.loading.weight_offload import OffloadedWeights
from blockyard.services.gpu_worker.lora.worker_adapters import WorkerAdapters
from blockyard.services.gpu_worker.models.interface import Model, tensors_of
from blockyard.services.gpu_worker.parallel.commands import Command, PackedForward, ReclaimMemory, ReleaseMemory
from blockyard.services.gpu_worker.parallel.team import RankGroups, SendCommand
from blockyard.services.gpu_worker.step import Step
from blockyard.services.kv_transfer.transfer_blocks import TransferBlocks


class EncoderLeader:
    """Tells followers of steps. Called before the leader computes its part."""

    def __init__(self, ranks: RankGroups, send: SendCommand) -> None:
        self._ranks, self._send = ranks, send

    def announce(self, step: Step, lengths: Ints) -> None:
        self._send(PackedForward(np.asarray(lengths, np.int64).tobytes(), step.token_types is not None))
        words = [step.token_ids, step.positions] + ([] if step.token_types is None else [step.token_types])
        self._ranks.everyone.copy_from_leader(torch.cat(words))


class EncoderFollower:
    """Computes its share of each step. It pools nothing."""

    adapters: WorkerAdapters | None = None
    stored: Sequence[StoredLayers] = ()

    def __init__(self, model: Model, ranks: RankGroups, make_product: Callable[[Ints], PackedProduct]) -> None:
        """make_product: see `PackedSteps`."""
        self._model, self._ranks, self._make_product = model, ranks, make_product
        self._offloaded: OffloadedWeights | None = None

    @property
    def kv_memory(self) -> TransferBlocks:
        raise NotImplementedError("a model without KV has no KV transfers")

    def do(self, command: Command) -> None:
        """Raises RankLostError if another rank is gone."""
        with torch.inference_mode():
            match command:
                case PackedForward():
                    self._forward(command)
                case ReleaseMemory():
                    self._offloaded = OffloadedWeights(tensors_of(self._model))
                    self._model.table.link.free_cached()
                case ReclaimMemory():
                    assert self._offloaded is not None
                    self._offloaded.restore()
                    self._offloaded = None
                case _:
                    raise AssertionError(f"no command for a model without KV: {command}")

    def _forward(self, command: PackedForward) -> None:
        lengths = np.frombuffer(command.lengths, np.int64).copy()
        count = int(lengths.sum())
        words = torch.empty((2 + command.has_types) * count, dtype=torch.int64, device=self._model.table.device)
        self._ranks.everyone.copy_from_leader(words)
        token_ids, positions, *types = torch.split(words, count)
        attend = PackedAttention(self._model.shape.attention, self._make_product(lengths))
        self._model.forward(Step(token_ids, positions, attend, token_types=types[0] if types else None))
