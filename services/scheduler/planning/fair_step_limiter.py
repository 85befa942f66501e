"""Limits prefill tokens per step where a policy has classes, because a step that was sent cannot be cancelled.

Prompts of a tenant above its share take at most as much time of a step as its decodes, so that a new request of another
tenant does not wait long for the end of the step. A waiting sequence of a lower class gets the next step without the
prompts of higher classes, and without decodes if these would take most of it. While online requests come, prompts of
batch lines lengthen a step by a quarter at most.
"""

from blockyard.services.scheduler.batch.worker_groups import WorkerGroup
from blockyard.services.scheduler.plan_pacer import StepLoad
from blockyard.services.scheduler.queue.policy import Policy
from blockyard.services.scheduler.sequences.requests import Sequence

MIN_STEP_RATIO = 3  # prompts may take at least the time of so many steps of one decode: shorter steps are inefficient
MAX_TOKENS_DIVISOR = 8  # prompts may take at least this part of `max_num_batched_tokens`
BATCH_STEP_SHARE, BATCH_TOKENS_DIVISOR = 0.25, 32  # of prompts of batch lines, which no client waits for


class FairStepLimiter:
    """To be asked only while the policy has classes."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def max_prefill_tokens(self, group: WorkerGroup, sequence: Sequence) -> int:
        """Prefill tokens of a step that has tokens of this sequence's prompt; at least one, or it would never start."""
        if not self._policy.over_share(sequence, group.max_num_seqs):
            return group.max_num_batched_tokens
        times = group.pacer.times
        decodes_s, single_s = (times.expected_s(StepLoad(num, 0)) for num in (len(group.running), 1))
        seconds, divisor = max(decodes_s, MIN_STEP_RATIO * single_s), MAX_TOKENS_DIVISOR
        if sequence.request.is_batch_line:
            seconds, divisor = BATCH_STEP_SHARE * max(decodes_s, single_s), BATCH_TOKENS_DIVISOR
        return max(1, times.tokens_within(seconds), group.max_num_batched_tokens // divisor)

    def excludes_other_prefills(self, group: WorkerGroup, sequence: Sequence) -> bool:
        """Whether a sequence starts in a plan without prompts of higher classes. Never in two plans in a row."""
        active, sent, rank = group.running, group.plan_clock.last_sent, self._policy.key(sequence)[0]
        if not active or group.last_fair_plan == sent or not self._policy.preemptible_by(active[-1].sequence, rank):
            return False
        return not any(
            running.num_scheduled_tokens < running.prefill_end for running in active if running.key[0] <= rank
        )

    def excludes_decodes(self, group: WorkerGroup) -> bool:
        """Whether such a plan also has no decodes: they would double the time of its step."""
        times = group.pacer.times
        return times.is_known and times.expected_s(StepLoad(len(group.running), 0)) >= 2 * times.expected_s(
            StepLoad(0, 0)
        )
