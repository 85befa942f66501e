"""Steps of plans: launched in order, and collected in order once they are done. The same on a GPU and on the CPU.

`DeviceSteps` computes a step: on a GPU while the host goes on, on the CPU before its launch returns.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
from torch import Tensor

from blockyard.kernels.slots.slot_state import WITH_TOKEN, SlotOutcome
from blockyard.services.gpu_worker.arrays import Bools, Integers, Ints
from blockyard.services.gpu_worker.batch import Batch
from blockyard.services.gpu_worker.execution.decode_tokens import DecodeTokens
from blockyard.services.gpu_worker.execution.device_slots import DeviceSlots
from blockyard.services.gpu_worker.execution.host_sampling import HostSampling
from blockyard.services.gpu_worker.execution.prompt_logprobs import (
    ScoredPrompt,
    ScoredRows,
    choose_prompts,
    entries_by_slot,
)
from blockyard.services.gpu_worker.host_link import DeviceEvent, HostLink
from blockyard.services.gpu_worker.interfaces import CompletedPlan, StoredLayers
from blockyard.services.gpu_worker.pooling.output import PooledResults
from blockyard.services.gpu_worker.slots import NONE_ALLOWED, NOT_FINITE, Problem, StepRows
from blockyard.shared.config.services.worker import LogprobsMode
from blockyard.shared.messages import FinishReason, Geometry, SlotResult, StepPlan, TokenLogprobs

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


class StepRequest(NamedTuple):
    rows: StepRows
    owners: Ints  # of the rows' slots
    needs_processing: bool  # a slot changes logits or reports log-probabilities, or the host samples it
    host_rows: list[int]  # rows that the host samples
    scored: list[ScoredPrompt]  # tokens of prompts that get log-probabilities
    sends: bool  # blocks are sent once their layers are stored


ReadLogprobs = Callable[[int, int, int], TokenLogprobs]  # of a row, its token and the number of top tokens


@dataclass(slots=True)
class LaunchedStep:
    """What the launch of a step leaves to collect. All but `stored` may be read once `done` has passed."""

    results: tuple[Integers, Integers, Integers]  # by row: SlotOutcome, token, number of computed tokens
    done: DeviceEvent
    stored: Sequence[StoredLayers] = ()
    read_logprobs: ReadLogprobs | None = None  # None: no row reports log-probabilities
    host_logits: Tensor | None = None  # of `StepRequest.host_rows`
    prompt_logprobs: Sequence[ScoredRows] = ()  # in host memory
    all_sampled: bool = False  # the step is done, and each slot is a decode that has taken a token and goes on
    pooled: PooledResults | None = None  # of slots that are complete; None: the step samples


class DeviceSteps(Protocol):
    """Computes steps on one device. Implemented by `cuda_steps.CudaSteps` and `cpu_steps.CpuSteps`."""

    runs_ahead: bool  # a launch returns before its step is done

    @property
    def slots(self) -> DeviceSlots: ...

    @property
    def capacity(self) -> int:
        """Sequences of a step."""

    @property
    def most_in_flight(self) -> int:
        """Launched steps that are not collected, at most."""

    def reset(self) -> None:
        """Drops all slots. No step may be in flight."""

    def order(self, slots: Ints) -> None:
        """Sorts the decodes of a step in place, where their order matters."""

    def launch(self, step: StepRequest) -> LaunchedStep: ...

    def idle(self) -> bool:
        """Does one piece of background work, such as capturing a CUDA graph. False: nothing is left."""


@dataclass(slots=True)
class InFlightStep:
    """A plan that is launched and not collected."""

    plan: StepPlan
    results: list[SlotResult]  # of slots that could not run
    slots: Ints  # in the order of the step's rows
    owners: Ints
    launched: LaunchedStep
    began_s: float  # time of its launch
    launch_s: float  # host time of its launch; 0 if the host computes the step
    num_logprobs: dict[int, int]  # by slot that reports log-probabilities: how many of the top tokens
    num_decodes: int  # leading rows that compute one token
    host_rows: list[int]  # rows that the host samples
    has_mask: Bools | None  # by row: the device applies its masks; None: no row has one


class DeviceLoop:
    """Launches steps and collects them in order.

    Lengths in `Batch.slots` count all steps in flight, as if no slot ended in them; a slot that ends is
    skipped by later steps. Token ids arrive when a step is collected.
    """

    def __init__(
        self, steps: DeviceSteps, batch: Batch, geometry: Geometry, mode: LogprobsMode, link: HostLink
    ) -> None:
        """mode: what the host reports beside a token; `steps` report `RAW_LOGPROBS`."""
        self.steps, self._batch = steps, batch
        eos = geometry.eos_token_ids
        self._host_sampling = HostSampling(batch, steps.slots, geometry.vocab_size, eos, mode, link)
        self._in_flight_steps: deque[InFlightStep] = deque()
        self._done_s = 0.0  # when the host saw that the last step was done

    def reset(self) -> None:
        """Drops all slots. No step may be in flight."""
        self.steps.reset()
        self._host_sampling.reset()

    def apply(self, plan: StepPlan) -> None:
        """Notes a plan's changes for the device, after the batch has applied them."""
        for slot in self.steps.slots.host_sampled.intersection(plan.ends) if plan.ends else ():
            self._host_sampling.end(slot)
        self.steps.slots.apply(plan, self._batch.slots)

    @property
    def num_slots(self) -> int:
        return self.steps.slots.num_slots

    @property
    def in_flight(self) -> int:
        return len(self._in_flight_steps)

    def can_launch(self) -> bool:
        return len(self._in_flight_steps) < self.steps.most_in_flight

    def launch(self, plan: StepPlan, results: list[SlotResult], rows: StepRows) -> Sequence[StoredLayers]:
        """Launches a step. `results` are returned with the step's.

        If the plan sends blocks and the step tells which layers are stored, returns them: on a GPU an eager step with
        prefills does, and so does a CUDA graph of prefills that records layers. A plan without slots completes in its
        turn.
        """
        began_s = time.perf_counter()
        table, state, steps = self._batch.slots, self.steps.slots, self.steps
        slots, counts = rows.slots, rows.counts
        if rows.num_decodes > 1:
            steps.order(rows.decodes)
        edits, wanted = state.logits_edits, state.num_prompt_logprobs
        host_rows = self._host_sampling.choose(slots, counts) if state.host_sampled else []
        needs_processing = bool(host_rows) or edits.needs_processing(slots)
        scored = choose_prompts(wanted, rows, table) if wanted else []
        owners, sends = table.owners[slots], bool(plan.sends)
        launched = steps.launch(StepRequest(rows, owners, needs_processing, host_rows, scored, sends))
        if launched.all_sampled:
            _, token_ids, computed = launched.results
            table.advance_sampled(slots, computed, token_ids)
        else:
            table.advance_ahead(slots, counts, ~state.samples_on_device[slots] if state.host_sampled else None)
        if launched.pooled is not None:
            for slot in launched.pooled.slots.tolist():
                table.finish(slot)  # it computes nothing more
        has_mask = state.has_mask[slots] if needs_processing else None
        if has_mask is not None and not has_mask.any():
            has_mask = None
        num_logprobs = edits.num_logprobs
        self._in_flight_steps.append(
            InFlightStep(
                plan,
                results,
                slots,
                owners,
                launched,
                began_s,
                time.perf_counter() - began_s if steps.runs_ahead else 0.0,
                {s: num_logprobs[s] for s in slots.tolist() if s in num_logprobs} if num_logprobs else {},
                rows.num_decodes,
                host_rows,
                has_mask,
            )
        )
        return launched.stored

    def collect(self) -> CompletedPlan | None:
        """The oldest plan in flight, if it is done."""
        if not self._in_flight_steps or not self._in_flight_steps[0].launched.done.query():
            return None
        return self._finish(self._in_flight_steps.popleft())

    def wait(self) -> CompletedPlan:
        """Waits for the oldest plan in flight."""
        flight = self._in_flight_steps.popleft()
        flight.launched.done.synchronize()
        return self._finish(flight)

    def sample_rows(self) -> None:
        """Samples rows of collected plans that wait for the host. Later plans have the results."""
        self._host_sampling.sample()

    def _finish(self, flight: InFlightStep) -> CompletedPlan:
        now = time.perf_counter()
        step_s, self._done_s = now - max(flight.began_s, self._done_s), now
        results, slots, num_decodes = flight.results, flight.slots, flight.num_decodes
        num = len(slots)
        if flight.launched.all_sampled and not flight.num_logprobs:
            _, tokens, computed = flight.launched.results
            rows = DecodeTokens(slots, tokens, computed)
        else:
            rows = self._take_rows(flight)
        if flight.host_rows:
            self._host_sampling.on_done(slots[flight.host_rows], flight.owners[flight.host_rows])
        if flight.launched.pooled is not None:
            results += self._pooled_results(flight, flight.launched.pooled)
        results += self._host_sampling.take_results(flight.plan, results)
        if flight.has_mask is not None and self._batch.matchers is not None and self.steps.runs_ahead:
            # the device has read them: the host's own reads are counted there
            outcomes = flight.launched.results[0][:num]
            self._batch.matchers.num_masks += int((flight.has_mask & np.isin(outcomes, WITH_TOKEN)).sum())
        self._batch.complete(flight.plan, results)
        failed = self._batch.host_swap.pop_failed_fetches(flight.plan)
        return CompletedPlan(
            flight.plan, results, time.time(), step_s, failed, flight.launch_s, rows, num_decodes < num
        )

    def _pooled_results(self, flight: InFlightStep, pooled: PooledResults) -> list[SlotResult]:
        lengths = dict(zip(flight.slots.tolist(), flight.launched.results[2].tolist(), strict=True))
        found = pooled.to_slot_results(lengths)
        if any(result.finish is FinishReason.FAILED for result in found):
            owners = dict(zip(flight.slots.tolist(), flight.owners.tolist(), strict=True))
            for result in found:
                if result.finish is FinishReason.FAILED:
                    self._batch.fail_slot(result.slot, owners[result.slot])
        return found

    def _take_rows(self, flight: InFlightStep) -> DecodeTokens:
        """Adds the tokens of a step to the table, and the results of rows that are not a decode's plain token."""
        slots, num = flight.slots, len(flight.slots)
        outcomes, tokens, computed = (column[:num] for column in flight.launched.results)
        plain = outcomes == SlotOutcome.TOKEN  # nearly every row
        held = self._batch.slots.owners[slots] == flight.owners
        if flight.num_decodes == num and not flight.num_logprobs and bool((plain & held).all()):
            self._batch.slots.set_tokens(slots, computed, tokens)
            return DecodeTokens(slots, tokens.copy(), computed.copy())  # the buffers are used again
        keep = plain & held
        self._batch.slots.set_tokens(slots[keep], computed[keep], tokens[keep])
        single = plain & (np.arange(num) < flight.num_decodes)
        if flight.num_logprobs:
            single &= [slot not in flight.num_logprobs for slot in slots.tolist()]
        rows, others = (
            DecodeTokens(slots[which], tokens[which], computed[which]) for which in (single, plain & ~single)
        )
        flight.results += others.to_slot_results()
        self._take_others(flight, plain, held)
        return rows

    def _take_others(self, flight: InFlightStep, plain: Bools, held: Bools) -> None:
        """Handles the rows that are not `plain`, and adds log-probabilities to the results."""
        outcomes = flight.launched.results[0][: len(flight.slots)]
        waiting = outcomes == SlotOutcome.WAITING
        for i in np.flatnonzero(~plain & ~waiting).tolist():
            self._take_other(flight, i, SlotOutcome(outcomes[i]), bool(held[i]))
        if waiting.any():
            self._take_waiting(flight, np.flatnonzero(waiting), held)
        if flight.num_logprobs:
            self._add_logprobs(flight)
        if flight.launched.prompt_logprobs:
            self._add_prompt_logprobs(flight)

    def _take_other(self, flight: InFlightStep, row: int, outcome: SlotOutcome, held: bool) -> None:
        """Handles a row that did not sample, or that ended its sequence."""
        slot, (_, tokens, computed) = int(flight.slots[row]), flight.launched.results
        length = int(computed[row])
        if outcome == SlotOutcome.PART:
            flight.results.append(SlotResult(slot, [], length))
        elif outcome != SlotOutcome.NOTHING:
            owner, token = int(flight.owners[row]), int(tokens[row])
            flight.results.append(self._finished_result(slot, owner, outcome, token, length))
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
        computed = flight.launched.results[2]
        flight.results += [
            SlotResult(int(slots[row]), [], int(computed[row]))
            for row in rows.tolist()
            if row >= flight.num_decodes and row not in failed
        ]
        if sampled:
            assert flight.launched.host_logits is not None
            chosen = [places[row] for row in sampled]
            self._host_sampling.add(flight.launched.host_logits, chosen, slots[sampled], flight.owners[sampled])

    def _fail_unmasked(self, flight: InFlightStep, rows: Ints) -> set[int]:
        """Tells the matchers which rows lacked their mask. Returns the rows of slots that have failed without it."""
        matchers, computed = self._batch.matchers, flight.launched.results[2]
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
        read, places = flight.launched.read_logprobs, {s: i for i, s in enumerate(flight.slots.tolist())}
        assert read is not None
        for i, result in enumerate(flight.results):
            num_top = flight.num_logprobs.get(result.slot)
            if num_top is not None and result.token_ids:
                logprobs = read(places[result.slot], result.token_ids[0], num_top)
                flight.results[i] = msgspec.structs.replace(result, logprobs=[logprobs])

    def _add_prompt_logprobs(self, flight: InFlightStep) -> None:
        by_slot = entries_by_slot(flight.launched.prompt_logprobs)
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
