"""Plans of models without KV: whole texts, packed, in the order of the policy, up to the token budget of a step.

A text is never divided between steps, and never preempted: its step cannot be called back, and nothing of it is left
behind. The texts of a request are taken in slices, so a step costs the same however many there are.
"""

from collections.abc import Mapping

from blockyard.services.scheduler.batch.plan_builder import PackedRun, PlanRecord
from blockyard.services.scheduler.batch.worker_groups import WorkerGroup
from blockyard.services.scheduler.planning.prefill_planner import PrefillPlanner
from blockyard.services.scheduler.queue.waiting_queue import WaitingQueue
from blockyard.shared.messages import PackedPart, PackedStep, StepPlan

LEAST_SHARE = 512  # tokens of a step that are not divided between idle groups


class EncoderPlanner:
    def __init__(
        self, scheduler: int, prefills: PrefillPlanner, waiting: WaitingQueue, groups: Mapping[int, WorkerGroup]
    ) -> None:
        """`scheduler`: this scheduler's incarnation."""
        self._scheduler, self._prefills, self._waiting, self._groups = scheduler, prefills, waiting, groups

    def plan(self, group: WorkerGroup, now: float) -> StepPlan | None:
        """The next plan of a group, or None if nothing can run in it now."""
        runs = self._take(group, now) if self._waiting.num_sequences else []
        if not runs:
            return None
        record = PlanRecord(group.plan_clock.last_sent + 1, packed=runs)
        ends = group.on_sent(record)
        return StepPlan(self._scheduler, record.number, ends, [], [], [], packed=_packed(runs))

    def _take(self, group: WorkerGroup, now: float) -> list[PackedRun]:
        """Takes waiting texts in order until one does not fit. An empty step takes a text of any length."""
        left, turn = self._budget(group), self._waiting.policy.turn_tokens
        runs: list[PackedRun] = []
        while left > 0 and self._waiting.num_sequences:
            sequence = self._prefills.next(group, now)
            if sequence is None or (texts := sequence.request.texts) is None:
                break
            if runs and not self._prefills.may_share_step(runs[0].sequence, sequence):
                break
            taken = texts.take(left if turn is None else min(left, turn), left if runs else None)
            if taken is None:
                break
            runs.append(PackedRun(sequence, taken, max(0.0, now - sequence.request.arrival_s)))
            self._prefills.start_texts(sequence, runs[-1].amount, now)
            left -= taken.num_tokens
        return runs

    def _budget(self, group: WorkerGroup) -> int:
        """Tokens of a step. Idle groups divide what waits."""
        if group.in_flight or len(self._groups) < 2:
            return group.max_num_batched_tokens
        num_idle = sum(not one.in_flight for one in self._groups.values())
        amount = self._waiting.usage.amount.plus(self._waiting.batch_usage.amount)
        return min(group.max_num_batched_tokens, max(-(-amount.tokens // num_idle), LEAST_SHARE))


def _packed(runs: list[PackedRun]) -> PackedStep:
    """Neighbouring texts with the same parameters are one part."""
    parts: list[PackedPart] = []
    for i, run in enumerate(runs):
        frame, count, seconds = run.texts.columns.frame, run.texts.num_texts, run.texts.second_starts
        if i and run.is_like(runs[i - 1]):
            last = parts[-1]
            parts[-1] = PackedPart(last.count + count, last.params, last.skip, last.second_starts + seconds)
        else:
            parts.append(PackedPart(count, frame.params, frame.skip, seconds))
    return PackedStep(
        b"".join([run.texts.token_ids for run in runs]), b"".join([run.texts.lengths for run in runs]), parts
    )
