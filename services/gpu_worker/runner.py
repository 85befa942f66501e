"""Runs step plans on a model: applies what changed, computes, samples, says what each slot produced."""

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from blockyard.services.gpu_worker.block_names import BlockNames
from blockyard.services.gpu_worker.kept_kv import ROOM
from blockyard.services.gpu_worker.kv_pool import KVPool
from blockyard.services.gpu_worker.models.decoder import Model
from blockyard.services.gpu_worker.prompt_scores import PromptScores
from blockyard.services.gpu_worker.reads import ReadPlanner, by_length
from blockyard.services.gpu_worker.sampler.sampler import Sampler
from blockyard.services.gpu_worker.slots import Slots
from blockyard.services.gpu_worker.step import Step
from blockyard.shared.messages import FinishReason, Geometry, SlotResult, StepPlan

Ints = npt.NDArray[np.int64]


class Output(Protocol):
    @property
    def hidden(self) -> Tensor: ...
    @property
    def logits(self) -> Tensor: ...


class DecodeSteps(Protocol):
    """How steps without prefill run on a GPU; see decode_steps.py."""

    def forget(self) -> None: ...
    def takes(self, slots: Ints) -> bool: ...
    def run(self, slots: Ints, table: Slots) -> Output: ...


class Runner:
    """The device state of one worker and the loop body over it."""

    def __init__(self, model: Model, pool: KVPool, geometry: Geometry, decode_steps: DecodeSteps | None = None) -> None:
        self.geometry = geometry
        self.names = BlockNames(pool.num_blocks)
        self._model, self._pool = model, pool
        self._planner, self._decode_steps = ReadPlanner(pool), decode_steps
        self._sampler = Sampler(geometry.vocab_size, geometry.eos_token_ids, pool.device)
        self._prompt_scores = PromptScores(model)
        self._eos = frozenset(geometry.eos_token_ids)
        self.reset(0)

    def reset(self, num_slots: int) -> None:
        """Drops all slots; KV and its names stay."""
        shape = self.geometry
        self.names.admit_all()
        self._slots = Slots(num_slots, shape.max_model_len, shape.block_size, shape.vocab_size, shape.num_blocks)
        self._sampler.reset(num_slots)
        self._planner.forget()
        if self._decode_steps is not None:
            self._decode_steps.forget()

    def execute(self, plan: StepPlan) -> list[SlotResult]:
        """Applies and runs one plan. A slot that cannot run or sample fails alone."""
        self._apply(plan)
        results = self._broken(plan)
        slots, counts = self._slots.grant(plan.runs)
        if len(slots):
            with torch.inference_mode():
                results.extend(self._step(slots, counts))
        self.names.learn(plan.names)
        for result in results:
            if result.finish == FinishReason.FAILED and result.slot in self._slots.slots:
                self.names.bar(result.slot, self._blocks_of(result.slot).tolist())
        return results

    def _apply(self, plan: StepPlan) -> None:
        for slot in plan.ends:
            self.names.admit(slot)
            self._slots.end(slot)
            self._sampler.end(slot)
        for start in plan.starts:
            self.names.admit(start.slot)
            self._sampler.end(start.slot)
            if self._slots.start(start):
                problem = self._sampler.start(start)
                if problem:
                    self._slots.errors[start.slot] = problem
                    self._slots.fail(start.slot)
            if start.slot in self._slots.errors:
                self.names.bar(start.slot, start.blocks)
        for added in plan.blocks:
            self._slots.add_blocks(added)

    def _broken(self, plan: StepPlan) -> list[SlotResult]:
        """What is said, once, of slots that cannot run."""
        errors = self._slots.errors
        if not errors:
            return []
        broken = [r.slot for r in plan.runs if r.slot in errors]
        return [SlotResult(s, [], 0, finish=FinishReason.FAILED, detail=errors.pop(s)) for s in broken]

    def _step(self, slots: Ints, counts: Ints) -> list[SlotResult]:
        table = self._slots
        if self._decode_steps is not None and counts.max() == 1 and self._decode_steps.takes(slots):
            begin = table.computed[slots]
            self.names.forget(table.tables[slots, begin // table.block_size])
            output = self._decode_steps.run(slots, table)
            hidden, logits = output.hidden, output.logits
        else:
            slots, begin, hidden = self._forward(slots, counts)
            logits = None
        table.computed[slots] = begin + counts
        results = self._sample(slots, np.cumsum(counts) - 1, hidden, logits)
        return self._prompt_scores.add(table, slots, counts, begin, hidden, results)

    def _forward(self, slots: Ints, counts: Ints) -> tuple[Ints, Ints, Tensor]:
        """Slots, in the order that was computed, the tokens each had, and the hidden rows of the new ones."""
        table = self._slots
        begin = table.computed[slots]
        lengths = begin + counts
        num_decodes = int((counts == 1).sum())
        if (order := by_length(lengths[:num_decodes])) is not None:
            for array in (slots, begin, lengths):
                array[:num_decodes] = array[:num_decodes][order]
        rows, positions = slots, begin
        if num_decodes < len(slots):
            rows = np.repeat(slots, counts)
            first = np.cumsum(counts) - counts
            positions = np.arange(len(rows)) - np.repeat(first - begin, counts)
        size = table.block_size
        blocks = table.tables[rows, positions // size]
        tables = table.tables[:, : (int(lengths.max()) + ROOM) // size + 1][slots]  # not the whole of a long context
        self.names.forget(blocks)
        attend = self._planner.attention(
            blocks, positions % size, tables, counts, lengths, table.owners[slots], num_decodes
        )
        step = Step(self._tensor(table.token_ids[rows, positions]), self._tensor(positions), attend)
        return slots, begin, self._model.forward(step)

    def _sample(self, slots: Ints, last: Ints, hidden: Tensor, logits: Tensor | None) -> list[SlotResult]:
        """Tokens for the slots whose known tokens are all computed. `last` is each slot's last row of `hidden`.

        `logits`: of all rows, where they are known already.
        """
        table = self._slots
        lengths = table.computed[slots].tolist()
        at_end = (table.computed[slots] == table.known[slots]).tolist()
        results: list[SlotResult] = []
        ready: list[int] = []  # places in `slots`
        for place, slot in enumerate(slots.tolist()):
            full = lengths[place] >= table.slots[slot].max_known
            if at_end[place] and not full:
                ready.append(place)
                continue
            finish = FinishReason.LENGTH if at_end[place] else None
            if finish is not None:
                table.live[slot] = False
            results.append(SlotResult(slot, [], lengths[place], finish))
        if not ready:
            return results
        chosen = slots[ready]
        rows = hidden if logits is None else logits
        if len(ready) < len(rows):
            rows = rows.index_select(0, self._tensor(last[ready]))
        sampled = self._sampler.sample(self._model.logits(rows) if logits is None else rows, chosen, table)
        table.append(chosen, np.array(sampled.token_ids, np.int64))
        for i, slot in enumerate(chosen.tolist()):
            length = lengths[ready[i]]
            if (problem := sampled.problems.get(i)) is not None:
                self._drop(slot)
                results.append(SlotResult(slot, [], length, FinishReason.FAILED, detail=problem))
                continue
            token = sampled.token_ids[i]
            finish, stop = self._finish(slot, token, length + 1)
            if finish is not None:
                table.live[slot] = False
            logprobs = sampled.logprobs.get(i)
            results.append(SlotResult(slot, [token], length, finish, stop, [logprobs] if logprobs else []))
        return results

    def _finish(self, slot: int, token: int, known: int) -> tuple[FinishReason | None, int | None]:
        """Whether this token ends the choice, and the stop id that did."""
        state = self._slots.slots[slot]
        if token in self._eos and not state.sampling.ignore_eos:
            return FinishReason.STOP, None
        if token in state.stop_ids:
            return FinishReason.STOP, token
        return (FinishReason.LENGTH if known >= state.max_known else None), None

    def _drop(self, slot: int) -> None:
        """After logits that are not numbers: what it wrote must not reach the next owner of its blocks."""
        self._slots.fail(slot)
        self._pool.scrub(self._blocks_of(slot))

    def _blocks_of(self, slot: int) -> Ints:
        return self._slots.tables[slot, : self._slots.num_blocks[slot]]

    def _tensor(self, values: Ints) -> Tensor:
        return torch.from_numpy(values).to(self._pool.device, non_blocking=True)
