"""Plans of models without KV: whole texts, packed, in the order of the policy, up to the token budget of a step.

A text is never divided between steps, and never preempted: its step cannot be called back, and nothing of it is left
behind.
"""

from blockyard.services.scheduler.batch.plan_builder import PlanBuilder
from blockyard.services.scheduler.batch.worker_groups import WorkerGroup
from blockyard.services.scheduler.kv_cache.prefix_cache import PrefixMatch
from blockyard.services.scheduler.planning.prefill_planner import PrefillPlanner
from blockyard.services.scheduler.queue.waiting_queue import WaitingQueue
from blockyard.shared.messages import StepPlan

NOTHING_FOUND = PrefixMatch()


class EncoderPlanner:
    def __init__(self, scheduler: int, prefills: PrefillPlanner, waiting: WaitingQueue) -> None:
        """`scheduler`: this scheduler's incarnation."""
        self._scheduler, self._prefills, self._waiting = scheduler, prefills, waiting

    def plan(self, group: WorkerGroup, now: float) -> StepPlan | None:
        """The next plan of a group, or None if nothing can run in it now."""
        builder = PlanBuilder(group.plan_clock.last_sent + 1, group.max_num_batched_tokens, now)
        self._pack(group, builder)
        if not builder.runs:
            return None
        ends = group.on_sent(builder.record)
        return StepPlan(self._scheduler, builder.record.number, ends, builder.starts, [], builder.runs)

    def _pack(self, group: WorkerGroup, builder: PlanBuilder) -> None:
        """Starts waiting sequences in order until one does not fit. An empty step takes a text of any length."""
        while builder.token_budget > 0 and self._waiting.num_sequences and group.can_schedule:
            sequence = self._prefills.next(group, builder.now)
            if sequence is None:
                return
            if self._prefills.end_unscheduled(group, sequence):
                continue
            if builder.runs and sequence.num_tokens > builder.token_budget:
                return
            running = self._prefills.start(group, builder, sequence, NOTHING_FOUND, 0)
            builder.schedule(running, sequence.num_tokens)
