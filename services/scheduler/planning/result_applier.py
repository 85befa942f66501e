"""Applies a StepResult to the sequences that ran in its plan."""

from array import array
from bisect import bisect_left
from collections import deque

import msgspec

from blockyard.services.scheduler.batch.decode_batch import BatchRows
from blockyard.services.scheduler.batch.plan_builder import PlanRecord
from blockyard.services.scheduler.batch.worker_groups import WorkerGroup
from blockyard.services.scheduler.lifecycle.beam_sequences import BeamScheduler
from blockyard.services.scheduler.lifecycle.lifecycle import Lifecycle
from blockyard.services.scheduler.outbox import VectorOutbox
from blockyard.services.scheduler.planning.packed_results import PackedResults
from blockyard.services.scheduler.queue.waiting_queue import WaitingQueue
from blockyard.services.scheduler.sequences.pooled_requests import PooledRequest
from blockyard.services.scheduler.sequences.requests import Phase, RunningSequence, Sequence
from blockyard.shared.messages import (
    NO_LOGPROBS,
    NO_TOKEN,
    SECOND_TOKEN_S,
    STEP_TOKENS,
    FinishReason,
    SlotResult,
    StepResult,
    TokenRows,
    TokenStep,
    decode_logprobs,
)


class ResultApplier:
    """Sends new tokens to detokenizers, ends finished sequences, and counts tokens."""

    def __init__(
        self, lifecycle: Lifecycle, waiting: WaitingQueue, beam_scheduler: BeamScheduler, vectors: VectorOutbox
    ) -> None:
        self.num_output_tokens = 0
        self.num_prompt_tokens = 0  # including tokens computed again
        self.step_sizes = [0] * (len(STEP_TOKENS) + 1)  # histogram of steps by their tokens
        self.num_step_tokens = 0
        self.second_tokens = [0] * (len(SECOND_TOKEN_S) + 1)  # histogram of the times after a handover
        self.second_token_s = 0.0  # sum of the same times
        self._now = 0.0  # of the result that is applied
        self._lifecycle, self._waiting = lifecycle, waiting
        self._beam_scheduler, self._vectors = beam_scheduler, vectors
        self._packed = PackedResults(lifecycle, waiting.policy, vectors)

    def apply(self, group: WorkerGroup, record: PlanRecord, result: StepResult, now: float) -> None:
        """Results of slots that did not run in the plan are ignored. A slot without a result computed nothing."""
        self._now = now
        before = self.num_prompt_tokens + self.num_output_tokens
        if record.packed and result.packed is not None:
            self.num_prompt_tokens += self._packed.apply(record.packed, result.packed)
        if result.failed_fetches:
            self._invalidate_unfetched(group, record, result.failed_fetches)
        self._apply_tokens(group, record, result)
        for slot in result.slots:
            running = record.sequences.pop(slot.slot, None)
            if running is not None:
                self._apply_slot(group, record, running, slot, result.stamp_s)
        for number, running in record.sequences.items():
            running.own_tokens -= record.chunk_sizes.get(number, 1)  # to be scheduled again
        if self._beam_scheduler.live:
            self._beam_scheduler.on_plan_completed(group)
        if record.filled:
            group.kv_cache.mark_blocks_full(record.filled)
        num_tokens = self.num_prompt_tokens + self.num_output_tokens - before
        if num_tokens:
            self.num_step_tokens += num_tokens
            self.step_sizes[bisect_left(STEP_TOKENS, num_tokens)] += 1

    def _apply_tokens(self, group: WorkerGroup, record: PlanRecord, result: StepResult) -> None:
        """Applies the results that are a single token. Slots with other results stay in `record.sequences`."""
        token_ids, begin = array("I", result.token_ids), 0
        singles: list[tuple[int, int, msgspec.Raw]] = []  # slots, tokens and their log-probabilities
        for rows in record.rows:
            tokens = token_ids[begin : begin + len(rows)] or array("I", [NO_TOKEN]) * len(rows)
            logprobs = result.logprobs[begin : begin + len(rows)]
            begin += len(rows)
            places = _indexes(tokens, NO_TOKEN)
            if record.detached_slots:
                places |= {rows.slots.index(slot) for slot in record.detached_slots if slot in rows.slots}
            if places:
                record.detach_rows(rows, places)
                singles += [
                    (rows.slots[i], tokens.pop(i), logprobs.pop(i) if logprobs else NO_LOGPROBS)
                    for i in sorted(places, reverse=True)
                ]
            self._apply_rows(rows.without(places) if places else rows, tokens, logprobs, result.stamp_s)
        runs = record.runs[begin:]
        outside = zip(runs, token_ids[begin:], result.logprobs[begin:] or [NO_LOGPROBS] * len(runs), strict=False)
        singles += [(run.slot, token, logprobs_of) for run, token, logprobs_of in outside]
        for slot, token, encoded in singles:
            running = record.sequences.pop(slot, None) if token != NO_TOKEN else None
            if running is not None:
                scores = decode_logprobs(encoded)
                single = SlotResult(
                    slot, [token], running.num_computed_tokens + 1, logprobs=[] if scores is None else [scores]
                )
                self._apply_slot(group, record, running, single, result.stamp_s)

    def _apply_rows(self, rows: BatchRows, tokens: "array[int]", logprobs: list[msgspec.Raw], stamp_s: float) -> None:
        """One token for each row, in loops that run in C: the largest part of a step."""
        if tokens:
            firsts = array("I", map(len, rows.outputs))
            rows.text_outbox.add_rows(
                TokenRows(rows.streams.tobytes(), firsts.tobytes(), tokens.tobytes(), logprobs), stamp_s
            )
            deque(map(array.append, rows.outputs, tokens), maxlen=0)
            self.num_output_tokens += len(tokens)
            for account, num_rows in rows.accounts.items():
                account.charge(num_rows)

    def _apply_slot(
        self, group: WorkerGroup, record: PlanRecord, running: RunningSequence, slot: SlotResult, stamp_s: float
    ) -> None:
        if slot.finish is not None and slot.finish is FinishReason.FAILED:
            self._invalidate_failed(group, running)
        if running.sequence.phase is not Phase.ENDED:
            self._apply_result(group, running, slot, record.chunk_sizes.get(slot.slot, 1), stamp_s)

    def _apply_result(
        self, group: WorkerGroup, running: RunningSequence, slot: SlotResult, num_scheduled_tokens: int, stamp_s: float
    ) -> None:
        """Applies the result of one slot. Tokens that were scheduled and not computed are to be scheduled again."""
        sequence, finish, num_tokens = running.sequence, slot.finish, len(slot.token_ids)
        self._on_computed(group, running, slot.num_computed, num_scheduled_tokens)
        if sequence.request.pool is not None:
            self._apply_vector(self._lifecycle.pools[sequence.request.pool.id], sequence, slot)
            return
        if num_tokens:
            if finish is None and sequence.num_tokens + num_tokens >= running.max_num_tokens:
                finish = FinishReason.LENGTH  # the limit of the worker may be larger
            self.num_output_tokens += num_tokens
            if sequence.request.account is not None:
                sequence.request.account.charge(num_tokens)
        elif finish is None and not slot.prompt_logprobs:
            return
        if sequence.hypothesis is not None:
            self._beam_scheduler.on_result(group, sequence, slot)
            return
        transfer_params = b""
        if finish is not None and (asked := sequence.request.transfer_params) is not None:
            transfer_params = asked.answer(group.worker, sequence.request.id)
        _send(sequence, slot, finish, stamp_s, transfer_params)
        if sequence.ticket:
            self._waiting.add_tokens(sequence, num_tokens)
        # log-probabilities are not kept: the gateway has them, or they are computed again
        scored = slot.first_prompt + len(slot.prompt_logprobs) if slot.prompt_logprobs else None
        sequence.add_outputs(slot.token_ids, scored)
        if num_tokens:
            running.has_sampled = True
            self._count_second_token(sequence)
        if finish is not None or running.leaves_prefilled:
            self._leave(group, running, finish, num_tokens)

    def _on_computed(
        self, group: WorkerGroup, running: RunningSequence, num_computed: int, num_scheduled_tokens: int
    ) -> None:
        done = num_computed - running.num_computed_tokens
        if done != num_scheduled_tokens:
            running.own_tokens -= num_scheduled_tokens - done
        if running.num_computed_tokens < running.prefill_end:
            self.num_prompt_tokens += max(0, done)
        running.num_prefilled = num_computed
        if num_computed >= running.table.next_hash_at:
            group.kv_cache.mark_block_full(running)

    def _apply_vector(self, pool: PooledRequest, sequence: Sequence, slot: SlotResult) -> None:
        """Sends the result of a request without text once its whole prompt is computed."""
        if slot.finish is not None and slot.finish <= FinishReason.LENGTH and not slot.token_ids:
            self._vectors.add(pool, sequence, slot)
            self._lifecycle.end(sequence)
        elif slot.finish is not None or slot.token_ids:
            detail = slot.detail or "the worker sampled tokens in place of a vector"
            self._lifecycle.fail(sequence, detail, slot.status)

    def _leave(
        self, group: WorkerGroup, running: RunningSequence, finish: FinishReason | None, num_tokens: int
    ) -> None:
        sequence = running.sequence
        if finish is not None:
            if num_tokens and running.leaves_prefilled and finish is not FinishReason.FAILED:
                self._lifecycle.pass_on(sequence)
            self._lifecycle.end(sequence)
        elif num_tokens and sequence.phase is Phase.RUNNING:
            self._lifecycle.hand_over(group, running, self._now)

    def _count_second_token(self, sequence: Sequence) -> None:
        """Counts the second token of a handed-over sequence.

        The step that seats it has a prompt token to compute, so its token is no row.
        """
        first_token_s = sequence.take_first_token_s()
        if first_token_s is not None:
            self.second_token_s += self._now - first_token_s
            self.second_tokens[bisect_left(SECOND_TOKEN_S, self._now - first_token_s)] += 1

    def _invalidate_failed(self, group: WorkerGroup, running: RunningSequence) -> None:
        for reader in group.kv_cache.invalidate_failed(running, group.active()):
            self._lifecycle.reschedule(group, reader)

    def _invalidate_unfetched(self, group: WorkerGroup, record: PlanRecord, blocks: list[int]) -> None:
        for reader in group.kv_cache.invalidate_unfetched(blocks, [*group.active(), *record.all_sequences()]):
            record.drop(reader)
            self._lifecycle.reschedule(group, reader)


def _indexes(tokens: "array[int]", token: int) -> set[int]:
    places: set[int] = set()
    place = -1
    for _ in range(tokens.count(token)):
        place = tokens.index(token, place + 1)
        places.add(place)
    return places


def _send(
    sequence: Sequence, slot: SlotResult, finish: FinishReason | None, stamp_s: float, transfer_params: bytes
) -> None:
    request, first, text_outbox = sequence.request, len(sequence.outputs), sequence.request.text_outbox
    if text_outbox is None:
        return
    text_outbox.add_step(
        TokenStep(
            request.id,
            request.attempt,
            sequence.index,
            first,
            slot.token_ids,
            finish,
            slot.stop_token,
            slot.detail,
            slot.logprobs,
            max(0, slot.first_prompt - request.num_virtual),
            slot.prompt_logprobs,
            0 if first else sequence.reported_cached_tokens,
            None if first else sequence.queued_s,
            slot.status,
            transfer_params,
        ),
        stamp_s,
    )
