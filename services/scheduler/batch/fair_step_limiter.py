"""How long others make somebody wait who has asked for little: a step that has left cannot be called back.

Prompts of whoever has more than his share take no more of a step than its decodes do, because somebody may come who
then has to wait for its end. Who comes and is of a lower class than others has the next step without their prompts, and
also without all decodes if they take so much of it that this is worth the step that they get later.
"""

from blockyard.services.scheduler.batch.plan_pacer import StepLoad
from blockyard.services.scheduler.queue.policy import Policy
from blockyard.services.scheduler.sequences.requests import Sequence
from blockyard.services.scheduler.workers.worker_groups import WorkerGroup

MIN_STEP_RATIO = (
    3  # times a step of one decode: that long prompts may take at least, or too much of the time goes to short steps
)
MAX_TOKENS_DIVISOR = 8  # of a step's tokens that prompts may take at least, whatever was measured


class FairStepLimiter:
    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def max_prefill_tokens(self, group: WorkerGroup, sequence: Sequence) -> int:
        """Of all prompts of a step, for this one's to be among them."""
        if not self._policy.over_share(sequence, group.max_num_seqs):
            return group.max_num_batched_tokens
        times = group.pacer.times
        seconds = max(
            times.expected_s(StepLoad(len(group.running), 0)), MIN_STEP_RATIO * times.expected_s(StepLoad(1, 0))
        )
        return max(times.tokens_within(seconds), group.max_num_batched_tokens // MAX_TOKENS_DIVISOR)

    def excludes_other_prefills(self, group: WorkerGroup, sequence: Sequence) -> bool:
        """Whether prompts of higher classes have no part in the plan in which this one is seated.

        Never in two plans in a row.
        """
        active, sent, rank = group.running, group.plan_clock.last_sent, self._policy.key(sequence)[0]
        if not active or group.last_fair_plan == sent or not self._policy.preemptible_by(active[-1].sequence, rank):
            return False
        return not any(
            running.num_scheduled_tokens < running.prefill_end for running in active if running.key[0] <= rank
        )

    def excludes_decodes(self, group: WorkerGroup) -> bool:
        """Whether nobody decodes in such a plan: a step takes twice as long with all of them."""
        times = group.pacer.times
        return times.is_known and times.expected_s(StepLoad(len(group.running), 0)) >= 2 * times.expected_s(
            StepLoad(0, 0)
        )
