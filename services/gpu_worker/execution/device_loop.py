"""Steps that run ahead of the host: the batch's state is on the device, and results are read when a step is done."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from torch import Tensor

from blockyard.kernels.slots.slot_state import WITH_TOKEN, SlotOutcome
from blockyard.services.gpu_worker.arrays import Bools, Ints
from blockyard.services.gpu_worker.batch import Batch
from blockyard.services.gpu_worker.execution import decode_graphs
from blockyard.services.gpu_worker.execution.decode_graphs import (
    DecodeSettings,
    DecodeSize,
    DecodeSteps,
    num_mask_slots,
)
from blockyard.services.gpu_worker.execution.decode_tokens import DecodeTokens
from blockyard.services.gpu_worker.execution.device_masks import share_masks
from blockyard.services.gpu_worker.execution.device_ops import make_device_ops
from blockyard.services.gpu_worker.execution.host_sampling import HostSampling
from blockyard.services.gpu_worker.execution.pinned_ring import StepBuffers
from blockyard.services.gpu_worker.execution.prefill_graphs import CudaGraphRecorder, PrefillGraphs
from blockyard.services.gpu_worker.execution.prefill_kernels import compile_prefills
from blockyard.services.gpu_worker.execution.prefill_sizes import MOST_BYTES
from blockyard.services.gpu_worker.execution.prefill_steps import PrefillSteps, max_context
from blockyard.services.gpu_worker.execution.prompt_logprobs import (
    DevicePromptLogprobs,
    ScoredPrompt,
    ScoredRows,
    entries_by_slot,
)
from blockyard.services.gpu_worker.execution.stored_layers import LayerEvents, LayerWords, layer_groups
from blockyard.services.gpu_worker.interfaces import CompletedPlan, StoredLayers
from blockyard.services.gpu_worker.kv.pool import KVPool
from blockyard.services.gpu_worker.linear_tuning.idle_tuning import IdleTuning
from blockyard.services.gpu_worker.memory import KVMemoryNeed
from blockyard.services.gpu_worker.models.interface import Model
from blockyard.services.gpu_worker.sampling.device_steps import edits_bytes
from blockyard.services.gpu_worker.slots import NONE_ALLOWED, NOT_FINITE, Problem
from blockyard.shared.config.services.worker import WorkerConfig
from blockyard.shared.messages import FinishReason, Geometry, KVRole, SlotResult, StepPlan

FINISH = {
    SlotOutcome.END_OF_SEQUENCE: FinishReason.STOP,
    SlotOutcome.STOP: FinishReason.STOP,
    SlotOutcome.LENGTH: FinishReason.LENGTH,
    SlotOutcome.FULL: FinishReason.LENGTH,
}
PROBLEMS = {
    SlotOutcome.NOT_FINITE: NOT_FINITE,
    SlotOutcome.NONE_ALLOWED: NONE_ALLOWED,
}


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """What the launch of a step leaves to collect."""

    buffers: StepBuffers
    stored: Sequence[StoredLayers] = ()
    scores: Sequence[ScoredRows] = ()  # log-probabilities of prompts, on the device


@dataclass(slots=True, kw_only=True)
class InFlightStep:
    """A plan that runs on the device now."""

    plan: StepPlan
    results: list[SlotResult]  # of slots that could not run
    slots: Ints  # in the order of the step's rows
    owners: Ints
    buffers: StepBuffers
    began_s: float  # time of its launch
    launch_s: float  # host time of its launch
    num_logprobs: dict[int, int]  # by slot that reports log-probabilities: how many of the top tokens
    num_decodes: int  # leading rows that compute one token
    host_rows: list[int]  # rows that the host samples
    host_logits: Tensor | None  # of these rows
    has_mask: Bools | None  # by row: the device applies its masks; None: no row has one
    prompt_logprobs: Sequence[ScoredRows]  # in host memory once the step is done


class DeviceLoop:
    """Launches steps and collects them in order.

    Lengths in `Batch.slots` count all steps in flight, as if no slot ended in them; a slot that ends is
    skipped by later steps. Token ids arrive when a step is collected.
    """

    def __init__(
        self,
        steps: DecodeSteps,
        batch: Batch,
        most_tokens: int,
        tuning: IdleTuning | None = None,
        records_layers: bool = False,
    ) -> None:
        """most_tokens: of a step. tuning: of linear layers in idle times, None: none is left. records_layers: CUDA
        graphs of prefills tell which layers are stored, for sends."""
        self.steps, self._batch, self._prefill_steps = steps, batch, PrefillSteps(steps)
        groups = layer_groups(steps.pool.shape.num_layers)
        self._layer_words = LayerWords(groups, steps.ops, steps.slots.state.step) if records_layers else None
        self._graphs = PrefillGraphs(steps, most_tokens, CudaGraphRecorder(steps, self._layer_words))
        self._tuning = tuning
        self._host_sampling = HostSampling(batch, steps.slots)
        self._prompt_logprobs = DevicePromptLogprobs(steps.model, steps.ops, steps.pool.device)
        self._in_flight_steps: deque[InFlightStep] = deque()
        self._on_captured: Callable[[], None] = lambda: None
        self._done_s = 0.0  # when the host saw that the last step was done

    def report_captures(self, on_captured: Callable[[], None]) -> None:
        """`on_captured` is called after each piece of work that `idle` did."""
        self._on_captured = on_captured

    def reset(self) -> None:
        """Drops all slots. No step may be in flight."""
        self.steps.slots.reset(self.steps.ring.step)
        self._host_sampling.reset()

    def capture(self) -> None:
        """Captures CUDA graphs for a few seconds; `idle` captures the others."""
        self.steps.capture()
        if not self.steps.capture_error:
            self._graphs.capture()

    @property
    def captured(self) -> float:
        """The fraction of the work of `idle` that is done; 1.0: none is left."""
        parts = [self.steps.captured, self._graphs.captured]
        if self._tuning is not None:
            parts.append(self._tuning.done)
        return sum(parts) / len(parts)

    def describe(self) -> list[str]:
        """Notes on graphs and tuned layers, one line each."""
        tuned = [self._tuning.describe()] if self._tuning is not None else []
        return [*tuned, self.steps.describe(), *([self._graphs.describe()] if not self.steps.capture_error else [])]

    def idle(self) -> bool:
        """Captures one missing size; with none missing, measures one linear layer. False: nothing is left."""
        if self.captured == 1.0:
            return False
        if not self.steps.capture_one() and not self._graphs.capture_one() and self._tuning is not None:
            tuned_rows = self._tuning.step()
            if tuned_rows is not None:
                self.steps.capture_again(tuned_rows)
        self._on_captured()
        return self.captured < 1.0

    def apply(self, plan: StepPlan) -> None:
        """Sends a plan's changes to the device, after the batch has applied them."""
        self.steps.slots.apply(plan, self._batch.slots)

    @property
    def capacity(self) -> int:
        return self.steps.capacity

    @property
    def num_slots(self) -> int:
        return self.steps.slots.num_slots

    @property
    def in_flight(self) -> int:
        return len(self._in_flight_steps)

    def can_launch(self) -> bool:
        return len(self._in_flight_steps) < len(self.steps.ring)

    def launch(self, plan: StepPlan, results: list[SlotResult], slots: Ints, counts: Ints) -> Sequence[StoredLayers]:
        """Launches the next `counts` tokens of each slot, decodes first. `results` are returned with the step's.

        If the plan sends blocks and the step tells which layers are stored, returns them: an eager step with prefills
        does, and so does a CUDA graph of prefills with `records_layers`. A plan without slots completes in its turn.
        """
        began_s = time.perf_counter()
        table, state = self._batch.slots, self.steps.slots
        host_rows = self._host_sampling.choose(slots, counts)
        needs_processing = bool(host_rows) or state.logits_edits.needs_processing(slots)
        wanted = state.num_prompt_logprobs
        scored = self._prompt_logprobs.choose(wanted, slots, counts, table) if wanted else []
        launched = self._launch_step(slots, counts, needs_processing, bool(plan.sends), scored)
        buffers, num_logprobs = launched.buffers, state.logits_edits.num_logprobs
        if num_logprobs:
            buffers.copy_logprobs(state.logits_edits.buffer)
        host_logits = self._host_sampling.copied_logits(host_rows)
        prompt_logprobs = self._prompt_logprobs.copy(launched.scores, buffers.done)
        table.advance_ahead(slots, counts, ~state.samples_on_device[slots])
        has_mask = state.has_mask[slots] if needs_processing else None
        if has_mask is not None and not has_mask.any():
            has_mask = None
        self._in_flight_steps.append(
            InFlightStep(
                plan=plan,
                results=results,
                slots=slots,
                owners=table.owners[slots],
                buffers=buffers,
                began_s=began_s,
                launch_s=time.perf_counter() - began_s,
                num_logprobs={s: num_logprobs[s] for s in slots.tolist() if s in num_logprobs} if num_logprobs else {},
                num_decodes=int((counts == 1).sum()),
                host_rows=host_rows,
                host_logits=host_logits,
                has_mask=has_mask,
                prompt_logprobs=prompt_logprobs,
            )
        )
        return launched.stored

    def _launch_step(
        self, slots: Ints, counts: Ints, needs_processing: bool, sends: bool, scored: list[ScoredPrompt]
    ) -> LaunchedStep:
        if not len(slots):
            buffers = self.steps.ring.take()
            self.steps.slots.count_step(self.steps.ring.step)
            return LaunchedStep(buffers)
        if counts[-1] > 1:
            return self._launch_prefill(slots, counts, needs_processing, sends, scored)
        size = self._size(slots)
        buffers = self._begin(slots, counts, size.rows)
        output = self.steps.forward(size)
        self.steps.sample(size, output, needs_processing)
        scores = self._prompt_logprobs.compute_logits(scored, output.logits) if scored else []
        return LaunchedStep(buffers, scores=scores)

    def _launch_prefill(
        self, slots: Ints, counts: Ints, needs_processing: bool, sends: bool, scored: list[ScoredPrompt]
    ) -> LaunchedStep:
        """Launches a step with prefill, as a CUDA graph if one fits. The result has its layers if it `sends`."""
        table, descriptor = self._batch.slots, self._prefill_steps.descriptor(counts, keeps_hidden=bool(scored))
        num_decodes, stored = descriptor.num_decodes, list[StoredLayers]()
        # latent layers decompress cached tokens in pieces, whose number a graph cannot follow; none measures scales
        pool = self.steps.pool
        is_captured = not pool.scales_pending and not (pool.shape.has_latent and max_context(slots, counts, table))
        graph = self._graphs.find(descriptor) if is_captured else None
        if graph is not None:
            descriptor = graph.descriptor
            buffers = self._begin(slots, counts, descriptor.num_decodes)
            graph.run(buffers, slots, counts, table, needs_processing)
            hidden = graph.hidden
            if sends and self._layer_words is not None:
                stored = self._layer_words.stored(self.steps.ring.step)
        else:
            buffers = self._begin(slots, counts, num_decodes)
            events = LayerEvents(self.steps.pool.shape.num_layers) if sends else None
            step = self._prefill_steps.prepare(buffers, descriptor, slots, counts, table, events)
            output = step.forward()
            step.sample(output, needs_processing)
            hidden = output.hidden
            if events is not None:
                stored = events.stored
        if hidden is None:
            return LaunchedStep(buffers, stored)
        padding = descriptor.num_decodes - num_decodes
        scores = self._prompt_logprobs.compute_rows(scored, hidden, num_decodes, padding)
        return LaunchedStep(buffers, stored, scores)

    def collect(self) -> CompletedPlan | None:
        """The oldest plan in flight, if it is done."""
        if not self._in_flight_steps or not self._in_flight_steps[0].buffers.done.query():
            return None
        return self._finish(self._in_flight_steps.popleft())

    def wait(self) -> CompletedPlan:
        """Waits for the oldest plan in flight."""
        flight = self._in_flight_steps.popleft()
        flight.buffers.done.synchronize()
        return self._finish(flight)

    def sample_rows(self) -> None:
        """Samples rows of collected plans that wait for the host. Later plans have the results."""
        self._host_sampling.sample()

    def _size(self, slots: Ints) -> DecodeSize:
        return self.steps.padded(len(slots), int(self._batch.slots.num_computed[slots].max()) + 1)

    def _begin(self, slots: Ints, counts: Ints, num_rows: int) -> StepBuffers:
        """Brings the device's state up to date. num_rows: rows of decodes, with padding."""
        table, steps = self._batch.slots, self.steps
        num_decodes = int((counts == 1).sum())
        decodes = slots[:num_decodes]
        positions, size = table.num_computed[slots], table.block_size
        self._batch.block_hashes.invalidate(table.tables[decodes, positions[:num_decodes] // size])
        for slot, begin, count in zip(slots[num_decodes:], positions[num_decodes:], counts[num_decodes:], strict=True):
            self._batch.block_hashes.invalidate(table.tables[slot, begin // size : -(-(begin + count) // size)])
        steps.slots.send_next_tokens(decodes[positions[:num_decodes] < table.num_start_tokens[decodes]], table)
        buffers = steps.ring.take()
        steps.slots.assign(decodes, num_rows)
        if not num_rows:
            steps.slots.count_step(steps.ring.step)
        index, values = steps.slots.take()
        if len(index):
            buffers.write(index, values)
            steps.ops.scatter(steps.slots.state.arena, buffers.pairs, len(index))
        return buffers

    def _finish(self, flight: InFlightStep) -> CompletedPlan:
        now = time.perf_counter()
        step_s, self._done_s = now - max(flight.began_s, self._done_s), now
        results, slots = flight.results, flight.slots
        outcomes, tokens, computed = flight.buffers.results[:, : len(slots)]
        plain = outcomes == SlotOutcome.TOKEN  # nearly every row
        held = self._batch.slots.owners[slots] == flight.owners
        keep = plain & held
        self._batch.slots.set_tokens(slots[keep], computed[keep], tokens[keep])
        single = plain & (np.arange(len(slots)) < flight.num_decodes)
        if flight.num_logprobs:
            single &= ~np.isin(slots, list(flight.num_logprobs))
        rows, others = (
            DecodeTokens(slots[which], tokens[which], computed[which]) for which in (single, plain & ~single)
        )
        results += others.to_slot_results()
        waiting = outcomes == SlotOutcome.WAITING
        for i in np.flatnonzero(~plain & ~waiting).tolist():
            self._take_other(flight, i, SlotOutcome(outcomes[i]), bool(held[i]))
        if flight.host_rows:
            self._host_sampling.on_done(slots[flight.host_rows], flight.owners[flight.host_rows])
        if waiting.any():
            self._take_waiting(flight, np.flatnonzero(waiting), held)
        if flight.num_logprobs:
            self._add_logprobs(flight)
        if flight.prompt_logprobs:
            self._add_prompt_logprobs(flight)
        results += self._host_sampling.take_results(flight.plan, results)
        if flight.has_mask is not None and self._batch.matchers is not None:
            self._batch.matchers.num_masks += int((flight.has_mask & np.isin(outcomes, WITH_TOKEN)).sum())
        self._batch.complete(flight.plan, results)
        failed = self._batch.host_swap.pop_failed_fetches(flight.plan)
        has_prefill = flight.num_decodes < len(slots)
        return CompletedPlan(flight.plan, results, time.time(), step_s, failed, flight.launch_s, rows, has_prefill)

    def _take_other(self, flight: InFlightStep, row: int, outcome: SlotOutcome, held: bool) -> None:
        """Handles a row that did not sample, or that ended its sequence."""
        slot, (token, length) = int(flight.slots[row]), flight.buffers.results[1:, row].tolist()
        if outcome == SlotOutcome.PART:
            flight.results.append(SlotResult(slot, [], length))
        elif outcome != SlotOutcome.NOTHING:
            flight.results.append(self._finished_result(slot, int(flight.owners[row]), outcome, token, length))
            if held:
                self._batch.slots.finish(slot)

    def _take_waiting(self, flight: InFlightStep, rows: Ints, held: Bools) -> None:
        """Rows whose logits the step copied are sampled by `sample_rows`. The others compute the same token again.

        A slot that gets no more masks fails.
        """
        table, slots = self._batch.slots, flight.slots
        active = rows[held[rows] & table.live[slots[rows]]]
        on_device = self.steps.slots.samples_on_device[slots[active]]
        for slot in slots[active[on_device]].tolist():
            table.take_back(slot)
        failed = self._fail_unmasked(flight, active[on_device]) if flight.has_mask is not None else set()
        places = {row: place for place, row in enumerate(flight.host_rows)}
        sampled = [row for row in active[~on_device].tolist() if row in places]
        flight.results += [
            SlotResult(int(slots[row]), [], int(flight.buffers.results[2, row]))
            for row in rows.tolist()
            if row >= flight.num_decodes and row not in failed
        ]
        if sampled:
            assert flight.host_logits is not None
            chosen = [places[row] for row in sampled]
            self._host_sampling.add(flight.host_logits, chosen, slots[sampled], flight.owners[sampled])

    def _fail_unmasked(self, flight: InFlightStep, rows: Ints) -> set[int]:
        """Tells the matchers which rows lacked their mask. Returns those whose slot has failed for lack of it."""
        matchers, computed = self._batch.matchers, flight.buffers.results[2]
        assert matchers is not None and flight.has_mask is not None
        late = {int(flight.slots[row]): row for row in rows[flight.has_mask[rows]].tolist()}
        matchers.late({slot: int(computed[row]) + 1 for slot, row in late.items()}, flight.began_s)
        failed = set()
        for slot, row in late.items():
            if problem := matchers.problem(slot):
                failed.add(row)
                self._batch.fail_slot(slot, int(flight.owners[row]))
                flight.results.append(_failed(slot, int(computed[row]), problem))
        return failed

    def _add_logprobs(self, flight: InFlightStep) -> None:
        assert flight.buffers.logprobs is not None
        words, places = flight.buffers.logprobs.numpy(), {s: i for i, s in enumerate(flight.slots.tolist())}
        for i, result in enumerate(flight.results):
            num_top = flight.num_logprobs.get(result.slot)
            if num_top is not None and result.token_ids:
                place, token = places[result.slot], result.token_ids[0]
                logprobs = self.steps.slots.logits_edits.read_logprobs(words, place, token, num_top)
                flight.results[i] = msgspec.structs.replace(result, logprobs=[logprobs])

    def _add_prompt_logprobs(self, flight: InFlightStep) -> None:
        by_slot = entries_by_slot(flight.prompt_logprobs)
        for i, result in enumerate(flight.results):
            if result.slot in by_slot:
                first, entries = by_slot[result.slot]
                flight.results[i] = msgspec.structs.replace(result, first_prompt=first, prompt_logprobs=entries)

    def _finished_result(self, slot: int, owner: int, outcome: SlotOutcome, token: int, length: int) -> SlotResult:
        problem = PROBLEMS.get(outcome)
        if problem is not None:
            self._batch.fail_slot(slot, owner)
            return _failed(slot, length, problem)
        ids = [] if outcome == SlotOutcome.FULL else [token]
        return SlotResult(slot, ids, length, FINISH[outcome], token if outcome == SlotOutcome.STOP else None)


def _failed(slot: int, length: int, problem: Problem) -> SlotResult:
    return SlotResult(slot, [], length, FinishReason.FAILED, detail=problem.cause, status=problem.status)


def graph_bytes(
    model: Model, need: KVMemoryNeed, dtype: torch.dtype, logits_edits: bool, captures: bool
) -> tuple[int, int]:
    """Bytes that buffers and graphs of all steps will need, and bytes that edits of logits need besides; cuda only.

    Measured on the largest decode step. captures: False: there will be no graphs, and other buffers are small.
    """
    edits = edits_bytes(need.max_num_seqs, model.shape.vocab_size) if logits_edits else 0
    if not captures:
        return 0, edits
    return decode_graphs.graph_bytes(model, need, dtype, logits_edits) - edits + MOST_BYTES, edits


def start(
    batch: Batch,
    model: Model,
    pool: KVPool,
    geometry: Geometry,
    config: WorkerConfig,
    tuning: IdleTuning | None = None,
) -> DeviceLoop:
    """Raises LoadError for a model that the kernels do not support."""
    settings = DecodeSettings(
        capacity=geometry.max_num_seqs,
        max_model_len=geometry.max_model_len,
        eos_token_ids=geometry.eos_token_ids,
        graph_sizes=config.graph_sizes,
        logits_edits=config.run_ahead_penalties,
        masks=share_masks(batch.matchers, num_mask_slots(geometry.max_num_seqs), pool.device),
    )
    steps = DecodeSteps(model, pool, settings, make_device_ops(pool, config.fused_steps))
    if pool.device.type == "cuda" and not pool.batch_invariant:
        compile_prefills(pool, model.table.dtype)
    most_tokens = min(geometry.max_num_batched_tokens, geometry.max_model_len)
    return DeviceLoop(steps, batch, most_tokens, tuning, sends_prefills(config))


def sends_prefills(config: WorkerConfig) -> bool:
    """Whether this worker's prefills are usually for another worker.

    A decode worker computes prompts for others only while no prefill worker lives. Blocks leave at the end
    of its CUDA graphs then.
    """
    return config.kv_transfer is not None and config.kv_transfer.role is not KVRole.DECODE
