"""Steps ahead of the host: the batch lives on the device, and what came of a step is read when it is done."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from blockyard.kernels.slots.advance_slots import SlotOutcome
from blockyard.services.gpu_worker.batch import Batch
from blockyard.services.gpu_worker.compilation.prefill_kernels import compile_prefills
from blockyard.services.gpu_worker.execution import decode_graphs
from blockyard.services.gpu_worker.execution.decode_graphs import DecodeSteps, Size
from blockyard.services.gpu_worker.execution.device_ops import TritonDeviceOps
from blockyard.services.gpu_worker.execution.pinned_ring import Entry
from blockyard.services.gpu_worker.execution.prefill_graphs import MixedGraphs
from blockyard.services.gpu_worker.execution.prefill_sizes import MOST_BYTES
from blockyard.services.gpu_worker.execution.prefill_steps import MixedSteps
from blockyard.services.gpu_worker.interfaces import Done
from blockyard.services.gpu_worker.kv.pool import KVPool
from blockyard.services.gpu_worker.linear_tuning.idle_tuning import IdleTuning
from blockyard.services.gpu_worker.memory import Need
from blockyard.services.gpu_worker.models.decoder import Model
from blockyard.services.gpu_worker.rows import Rows
from blockyard.shared.messages import FinishReason, Geometry, SlotResult, StepPlan

__all__ = ["DeviceLoop", "graph_bytes", "start"]

Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.int32]

FINISH = {
    SlotOutcome.END_OF_SEQUENCE: FinishReason.STOP,
    SlotOutcome.STOP: FinishReason.STOP,
    SlotOutcome.LENGTH: FinishReason.LENGTH,
    SlotOutcome.FULL: FinishReason.LENGTH,
}
PROBLEMS = {
    SlotOutcome.NOT_FINITE: "the model's logits are not finite",
    SlotOutcome.NONE_ALLOWED: "no token is allowed here",
}


@dataclass(slots=True)
class Flight:
    """A plan that runs on the device."""

    plan: StepPlan
    results: list[SlotResult]  # of slots that could not run
    slots: Ints  # in the order of the step's rows
    owners: Ints
    entry: Entry
    began_s: float  # its launch
    launch_s: float  # how long that took
    scored: dict[int, int]  # slots that want log-probabilities, and how many of the likeliest
    num_decodes: int  # leading rows that compute one token


class DeviceLoop:
    """Launches steps and collects them in order.

    In `Batch.slots`, lengths are those after all steps in flight, should no slot end in them: a slot that does takes
    part in none of the later ones. Ids of tokens arrive when a step is collected.
    """

    def __init__(self, steps: DecodeSteps, batch: Batch, most_tokens: int, tuning: IdleTuning | None = None) -> None:
        """most_tokens: of a step. tuning: of linear layers, None: there is nothing to measure."""
        self.steps, self._batch, self._mixed = steps, batch, MixedSteps(steps)
        self._graphs, self._tuning = MixedGraphs(steps, most_tokens), tuning
        self.flights: deque[Flight] = deque()
        self.on_captured: Callable[[], None] = lambda: None  # `idle` did a piece of its work
        self._done_s = 0.0  # when the last step was found to be done

    def forget(self) -> None:
        """All slots are gone. Nothing may be in flight."""
        self.steps.slots.reset(self.steps.ring.step)

    def capture(self) -> None:
        """CUDA graphs, as many as there is time for now; `idle` captures the others."""
        self.steps.capture()
        if not self.steps.problem:
            self._graphs.capture()

    @property
    def captured(self) -> float:
        """The part of what `idle` has to do that is done; 1.0: nothing is left."""
        parts = [self.steps.captured, self._graphs.captured]
        if self._tuning is not None:
            parts.append(self._tuning.done)
        return sum(parts) / len(parts)

    def describe(self) -> list[str]:
        """What there is of graphs and of tuned layers, in lines."""
        tuned = [self._tuning.describe()] if self._tuning is not None else []
        return [*tuned, self.steps.describe(), *([self._graphs.describe()] if not self.steps.problem else [])]

    def idle(self) -> bool:
        """Captures a size that was left out at the start, then measures a piece; False: nothing is left."""
        if self.captured == 1.0:
            return False
        if not self.steps.capture_one() and not self._graphs.capture_one() and self._tuning is not None:
            tuned_rows = self._tuning.step()
            if tuned_rows is not None:
                self.steps.capture_again(tuned_rows)
        self.on_captured()
        return self.captured < 1.0

    def note(self, plan: StepPlan) -> None:
        """What a plan changed, once the batch has it."""
        self.steps.slots.note(plan, self._batch.slots)

    @property
    def in_flight(self) -> int:
        return len(self.flights)

    def can_launch(self) -> bool:
        return len(self.flights) < len(self.steps.ring)

    def runs_ahead(self, slots: Ints, counts: Ints) -> bool:
        """Whether no slot of this step needs the host between its tokens."""
        return len(slots) > 0 and self.takes(slots, counts) and bool(self.steps.slots.drawn[slots].all())

    def takes(self, slots: Ints, counts: Ints) -> bool:
        """Whether a step of these slots can be computed on the device's state."""
        return len(slots) <= self.steps.capacity and int(slots.max()) < self.steps.slots.num_slots

    def launch(self, plan: StepPlan, results: list[SlotResult], slots: Ints, counts: Ints) -> None:
        """The next `counts` tokens of each slot, ones first. `results` are given out with the step's."""
        began_s = time.perf_counter()
        table, wishes = self._batch.slots, self.steps.slots.wishes
        asked = wishes.asked(slots)
        if counts[-1] == 1:
            size = self._size(slots)
            entry = self._begin(slots, counts, size.rows)
            self.steps.sample(size, self.steps.forward(size), asked)
        else:
            entry = self._launch_mixed(slots, counts, asked)
        if wishes.scored:
            entry.take_scores(wishes.buffer)
        entry.done.record()
        positions = table.computed[slots] + counts
        table.computed[slots] = positions
        table.known[slots] += positions == table.known[slots]
        scored = {s: wishes.scored[s] for s in slots.tolist() if s in wishes.scored} if wishes.scored else {}
        owners, num_decodes = table.owners[slots], int((counts == 1).sum())
        launch_s = time.perf_counter() - began_s
        self.flights.append(Flight(plan, results, slots, owners, entry, began_s, launch_s, scored, num_decodes))

    def _launch_mixed(self, slots: Ints, counts: Ints, asked: bool) -> Entry:
        """A step with prefill."""
        table, layout = self._batch.slots, self._mixed.layout(counts)
        graph = self._graphs.find(layout)
        if graph is not None:
            entry = self._begin(slots, counts, graph.layout.decodes)
            graph.run(entry, slots, counts, table, asked)
        else:
            entry = self._begin(slots, counts, layout.decodes)
            step = self._mixed.prepare(entry, layout, slots, counts, table)
            step.sample(step.forward(), asked)
        return entry

    def collect(self) -> Done | None:
        """The oldest plan in flight if it is done."""
        if not self.flights or not self.flights[0].entry.done.query():
            return None
        return self._finish(self.flights.popleft())

    def wait(self) -> Done:
        """The oldest plan in flight."""
        flight = self.flights.popleft()
        flight.entry.done.synchronize()
        return self._finish(flight)

    def run(self, slots: Ints, counts: Ints) -> tuple[Tensor, Tensor | None]:
        """Hidden rows of a step of which the host picks the tokens; logits too, where every count is one.

        Nothing may be in flight, and `renew` has to follow.
        """
        for slot in slots.tolist():
            if self.steps.slots.wishes.has_row(slot):  # steps that ran ahead were counted on the device alone
                self._batch.recount(slot)
        if counts[-1] == 1:
            size = self._size(slots)
            entry = self._begin(slots, counts, size.rows)
            output = self.steps.forward(size).first(len(slots))
            entry.done.record()
            return output.hidden, output.logits
        layout = self._mixed.layout(counts)
        entry = self._begin(slots, counts, layout.decodes)
        hidden = self._mixed.prepare(entry, layout, slots, counts, self._batch.slots).forward_all()
        entry.done.record()
        return hidden, None

    def renew(self, slots: Ints) -> None:
        """The host has computed a step of these slots."""
        self.steps.slots.renew(slots, self._batch.slots)

    def _size(self, slots: Ints) -> Size:
        return self.steps.padded(len(slots), int(self._batch.slots.computed[slots].max()) + 1)

    def _begin(self, slots: Ints, counts: Ints, num_rows: int) -> Entry:
        """Brings the device's state up to date. num_rows: those of decodes, some may pad."""
        table, steps = self._batch.slots, self.steps
        num_decodes = int((counts == 1).sum())
        decodes = slots[:num_decodes]
        positions, size = table.computed[slots], table.block_size
        self._batch.names.forget(table.tables[decodes, positions[:num_decodes] // size])
        for slot, begin, count in zip(slots[num_decodes:], positions[num_decodes:], counts[num_decodes:], strict=True):
            self._batch.names.forget(table.tables[slot, begin // size : -(-(begin + count) // size)])
        steps.slots.feed(decodes[positions[:num_decodes] < table.given[decodes]], table)
        entry = steps.ring.take()
        steps.slots.assign(decodes, num_rows)
        if not num_rows:
            steps.slots.count_step(steps.ring.step)
        index, values = steps.slots.take()
        if len(index):
            entry.write(index, values)
            steps.ops.scatter(steps.slots.state.arena, entry.pairs, len(index))
        return entry

    def _finish(self, flight: Flight) -> Done:
        now = time.perf_counter()
        step_s, self._done_s = now - max(flight.began_s, self._done_s), now
        results, slots = flight.results, flight.slots
        outcomes, tokens, computed = flight.entry.results[:, : len(slots)]
        plain = outcomes == SlotOutcome.TOKEN  # what nearly every row is
        held = self._batch.slots.owners[slots] == flight.owners
        self._note_tokens(plain & held, slots, tokens, computed)
        single = plain & (np.arange(len(slots)) < flight.num_decodes)
        if flight.scored:
            single &= ~np.isin(slots, list(flight.scored))
        rows, others = (Rows(slots[which], tokens[which], computed[which]) for which in (single, plain & ~single))
        results += others.in_words()
        for i in np.flatnonzero(~plain).tolist():
            self._take_other(flight, i, SlotOutcome(outcomes[i]), bool(held[i]))
        if flight.scored:
            self._add_scores(flight)
        self._batch.settle(flight.plan, results)
        failed = self._batch.transfers.take_failed(flight.plan)
        return Done(flight.plan, results, time.time(), step_s, failed, flight.launch_s, rows)

    def _note_tokens(self, rows: "npt.NDArray[np.bool_]", slots: Ints, tokens: Words, computed: Words) -> None:
        """What these rows drew, where their slots still have the owner that it is for."""
        self._batch.slots.token_ids[slots[rows], computed[rows]] = tokens[rows]

    def _take_other(self, flight: Flight, row: int, outcome: SlotOutcome, held: bool) -> None:
        """A row that did not draw a token and go on."""
        slot, (token, length) = int(flight.slots[row]), flight.entry.results[1:, row].tolist()
        if outcome == SlotOutcome.PART:
            flight.results.append(SlotResult(slot, [], length))
        elif outcome != SlotOutcome.NOTHING:
            flight.results.append(self._ended(slot, int(flight.owners[row]), outcome, token, length))
            if held:
                self._batch.slots.live[slot] = False

    def _add_scores(self, flight: Flight) -> None:
        assert flight.entry.scores is not None
        words, places = flight.entry.scores.numpy(), {s: i for i, s in enumerate(flight.slots.tolist())}
        for i, result in enumerate(flight.results):
            num_top = flight.scored.get(result.slot)
            if num_top is not None and result.token_ids:
                place, token = places[result.slot], result.token_ids[0]
                entry = self.steps.slots.wishes.read(words, place, token, num_top)
                flight.results[i] = msgspec.structs.replace(result, logprobs=[entry])

    def _ended(self, slot: int, owner: int, outcome: SlotOutcome, token: int, length: int) -> SlotResult:
        problem = PROBLEMS.get(outcome)
        if problem is not None:
            self._batch.drop(slot, owner)
            return SlotResult(slot, [], length, FinishReason.FAILED, detail=problem)
        ids = [] if outcome == SlotOutcome.FULL else [token]
        return SlotResult(slot, ids, length, FINISH[outcome], token if outcome == SlotOutcome.STOP else None)


def graph_bytes(model: Model, need: Need, dtype: torch.dtype, wishes: bool) -> int:
    """What the buffers and graphs of all steps will take, measured on the largest decode step; cuda only."""
    return decode_graphs.graph_bytes(model, need, dtype, wishes) + MOST_BYTES


def start(
    batch: Batch,
    model: Model,
    pool: KVPool,
    geometry: Geometry,
    sizes: list[int],
    wishes: bool,
    fused: bool,
    tuning: IdleTuning | None = None,
) -> DeviceLoop:
    """Raises LoadError for a model that the kernels do not take. `fused`: see TritonDeviceOps."""
    eos, length = geometry.eos_token_ids, geometry.max_model_len
    ops = TritonDeviceOps(fused and not pool.batch_invariant, pool.batch_invariant)
    steps = DecodeSteps(model, pool, geometry.max_num_seqs, length, eos, sizes, wishes, ops)
    if pool.device.type == "cuda" and not pool.batch_invariant:
        compile_prefills(pool, model.table.dtype)
    return DeviceLoop(steps, batch, min(geometry.max_num_batched_tokens, length), tuning)
