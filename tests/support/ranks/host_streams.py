"""Streams of a device in host memory: a thread does in order what is launched, while the host goes on."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
from reference_ops import ReferenceOps
from torch import Tensor

from blockyard.kernels.sampling.sampling_state import AdjustedLogits, SamplingTensors
from blockyard.kernels.slots.slot_state import SlotState, StepInputs
from blockyard.services.gpu_worker.host_link import LinkEvent, LinkStream, SameMemory
from blockyard.services.gpu_worker.models.interface import Model
from blockyard.services.gpu_worker.parallel.rank_group import PendingCollective, RankGroup
from blockyard.services.gpu_worker.step import Step


class HostStream:
    """Implements `LinkStream`, beside the stream of steps `steps`; None: it is that."""

    def __init__(self, steps: "HostStream | None" = None) -> None:
        self._queue, self.steps = SimpleQueue[Callable[[], object]](), steps or self
        threading.Thread(target=self._run, daemon=True).start()

    def launch(self, work: Callable[[], object]) -> None:
        self._queue.put(work)

    def mark(self) -> threading.Event:
        """Returns what is set once all work is done that is launched by now."""
        reached = threading.Event()
        self.launch(reached.set)
        return reached

    @torch.inference_mode()
    def _run(self) -> None:
        while True:
            self._queue.get()()

    def use(self) -> AbstractContextManager[Any]:
        return nullcontext()  # only a `QueuedGroup` works on it

    def follow_steps(self) -> None:
        self.launch(self.steps.mark().wait)

    def event(self) -> LinkEvent:
        return HostEvent(self)

    def synchronize(self) -> None:
        self.mark().wait()


class HostEvent:
    """Implements `LinkEvent` and `DeviceEvent`."""

    def __init__(self, stream: HostStream) -> None:
        self._stream, self._reached = stream, threading.Event()
        self._reached.set()

    def record(self) -> None:
        self._reached = self._stream.mark()

    def query(self) -> bool:
        return self._reached.is_set()

    def synchronize(self) -> None:
        self._reached.wait()

    def hold_steps(self) -> None:
        self._stream.steps.launch(self._reached.wait)


class HostStreams(SameMemory):
    """The link of such a device."""

    def __init__(self, steps: HostStream) -> None:
        self.beside = HostStream(steps)

    def stream(self) -> LinkStream:
        return self.beside


class QueuedGroup:
    """Copies from the leader on a stream beside the steps."""

    def __init__(self, group: RankGroup, stream: HostStream) -> None:
        self._group, self._stream, self.device = group, stream, group.device

    def begin_copy_from_leader(self, tensor: Tensor) -> PendingCollective | None:
        self._stream.launch(partial(self._group.copy_from_leader, tensor))
        return None

    def wait(self, work: PendingCollective | None) -> None:
        assert work is None


class QueuedModel:
    """A model on a stream: it returns what will have the results."""

    def __init__(self, model: Model, stream: HostStream, width: int) -> None:
        """width: of hidden states."""
        self._model, self._stream, self._width = model, stream, width
        self.shape, self.table, self.adapter_rows = model.shape, model.table, model.adapter_rows
        self.adaptable = model.adaptable

    def forward(self, step: Step) -> Tensor:
        rows = step.token_ids if step.logits_indices is None else step.logits_indices.rows
        hidden = torch.empty(len(rows), self._width)
        self._stream.launch(lambda: hidden.copy_(self._model.forward(step)))
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        logits = torch.empty(len(hidden), self.shape.vocab_size)
        self._stream.launch(lambda: logits.copy_(self._model.logits(hidden)))
        return logits


class QueuedOps(ReferenceOps):
    """The operations of a step on a stream."""

    def __init__(self, stream: HostStream) -> None:
        super().__init__()
        self._stream = stream

    def fused_decode_max_len(self, rows: int) -> int:
        return 0

    def scatter(self, arena: Tensor, pairs: Tensor, count: int) -> None:
        self._stream.launch(partial(super().scatter, arena, pairs, count))

    def gather_inputs(self, state: SlotState, inputs: StepInputs) -> None:
        self._stream.launch(partial(super().gather_inputs, state, inputs))

    def collect_changes(self, state: SlotState, slots: Tensor, changes: Tensor) -> None:
        self._stream.launch(partial(super().collect_changes, state, slots, changes))

    def sample(
        self,
        logits: Tensor,
        inputs: StepInputs,
        params: SamplingTensors,
        tokens: Tensor,
        best: Tensor,
        adjusted: AdjustedLogits | None,
    ) -> None:
        self._stream.launch(partial(super().sample, logits, inputs, params, tokens, best, adjusted))

    def advance(
        self,
        state: SlotState,
        inputs: StepInputs,
        tokens: Tensor,
        best: Tensor,
        ready: Tensor,
        eos: Tensor,
        results: Tensor,
        counts: Tensor | None,
    ) -> None:
        self._stream.launch(partial(super().advance, state, inputs, tokens, best, ready, eos, results, counts))
