"""Whose place is taken: by somebody who waits and whom the policy puts in a lower class."""

from blockyard.services.scheduler.kv_cache.prefix_cache import PrefixMatch
from blockyard.services.scheduler.lifecycle import Lifecycle
from blockyard.services.scheduler.queue.waiting_queue import WaitingQueue
from blockyard.services.scheduler.sequences.requests import Sequence
from blockyard.services.scheduler.workers.router import Router
from blockyard.services.scheduler.workers.worker_groups import WorkerGroup


class Preemption:
    def __init__(self, waiting: WaitingQueue, router: Router, lifecycle: Lifecycle) -> None:
        self.num_displaced = 0
        self._router, self._policy, self._lifecycle = router, waiting.policy, lifecycle

    def preempt_for(self, group: WorkerGroup, sequence: Sequence) -> None:
        """Before a plan: the one who is next gets the seat and the blocks that it lacks from higher classes.

        What is taken may rest for some plans, after which it fits. Nobody is preempted for one who would not.
        """
        active = group.running
        rank = self._policy.key(sequence)[0]
        if not active or not self._policy.preemptible_by(active[-1].sequence, rank):
            return
        found = group.kv_cache.find(sequence)
        above = [running for running in active if self._policy.preemptible_by(running.sequence, rank)]
        if self._lacks(group, sequence, found) > sum(
            len(running.table.blocks) - running.table.num_freed for running in above
        ):
            return
        self._router.reserve(group, sequence)
        while above and (len(active) >= group.max_num_seqs or self._lacks(group, sequence, found) > 0):
            self.num_displaced += 1
            self._lifecycle.preempt(group, above.pop())

    def _lacks(self, group: WorkerGroup, sequence: Sequence, found: PrefixMatch) -> int:
        """Blocks that would be missing even if nothing rested."""
        return group.kv_cache.num_blocks_lacking(sequence.num_tokens, found, alone=not group.running)
