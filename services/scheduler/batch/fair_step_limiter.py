"""How long others make somebody wait who has asked for little: a step that has left cannot be called back.

Prompts of whoever has more than his share take no more of a step than its decodes do, because somebody may come who
then has to wait for its end. Who comes and is of a lower class than others has the next step without their prompts, and
also without all decodes if they take so much of it that this is worth the step that they get later.
"""

from blockyard.services.scheduler.batch.step_times import Load
from blockyard.services.scheduler.queue.policy import Policy
from blockyard.services.scheduler.sequences.requests import Choice
from blockyard.services.scheduler.workers.worker_groups import WorkerGroup

PAYS = 3  # times a step of one decode: that long prompts may take at least, or too much of the time goes to short steps
LEAST_SHARE = 8  # of a step's tokens that prompts may take at least, whatever was measured


class ShortSteps:
    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def most_tokens(self, group: WorkerGroup, choice: Choice) -> int:
        """Of all prompts of a step, for this one's to be among them."""
        if not self._policy.over_share(choice, group.max_num_seqs):
            return group.max_num_batched_tokens
        times = group.departures.times
        seconds = max(times.expect(Load(len(group.running), 0)), PAYS * times.expect(Load(1, 0)))
        return max(times.tokens_in(seconds), group.max_num_batched_tokens // LEAST_SHARE)

    def goes_first(self, group: WorkerGroup, choice: Choice) -> bool:
        """Whether prompts of higher classes have no part in the plan in which this one is seated.

        Never in two plans in a row.
        """
        running, sent, rank = group.running, group.plan_clock.last_sent, self._policy.key(choice)[0]
        if not running or group.last_fair_plan == sent or not self._policy.preemptible_by(running[-1].choice, rank):
            return False
        return not any(seat.granted < seat.prefill_end for seat in running if seat.key[0] <= rank)

    def goes_alone(self, group: WorkerGroup) -> bool:
        """Whether nobody decodes in such a plan: a step takes twice as long with all of them."""
        times = group.departures.times
        return times.known and times.expect(Load(len(group.running), 0)) >= 2 * times.expect(Load(0, 0))
