"""Routes waiting sequences to worker groups: each to the group with the fewest tokens to compute for and before it.

With one group, sequences are taken straight from the waiting queue. With several, each step of the core begins with
`route`: the next sequence goes to the queue of a group, as long as a group has room, and starts with that group's next
plan. Group queues are short, about one step of tokens, so that other sequences can still go where there is room first.
A sequence may wait longer for a group that computes a prefix which they share. One with an adapter goes to groups that
hold it; if none does, it is set aside until one does. If these have no room, others pass it by in other groups alone.
"""

from collections.abc import Mapping

from blockyard.services.scheduler.admission.request_handler import Acceptance
from blockyard.services.scheduler.batch.worker_groups import WorkerGroup
from blockyard.services.scheduler.kv_cache.prefix_cache import PrefixMatch
from blockyard.services.scheduler.queue.adapter_waits import Adapters, AdapterWaits, first_lacking
from blockyard.services.scheduler.queue.waiting_queue import WaitingQueue
from blockyard.services.scheduler.sequences.requests import Sequence
from blockyard.services.scheduler.transfers.failures import LinkBackoff
from blockyard.services.scheduler.transfers.handovers import Handovers
from blockyard.services.scheduler.workers.group_queue import (
    GroupQueue,
    RoutedSequence,
    cost,
    place_cost,
    sibling_groups,
)
from blockyard.services.scheduler.workers.role_router import RoleRouter

TOO_LONG = 1 << 40  # the cost of a group in which the sequence reaches the length limit
MAX_PLANS_WAITED = 4  # in a group queue, before a sequence may go to another group

_NOTHING = PrefixMatch()


class Router:
    def __init__(
        self,
        waiting: WaitingQueue,
        groups: Mapping[int, WorkerGroup],
        acceptance: Acceptance,
        handovers: Handovers,
        links: LinkBackoff,
        adapter_waits: AdapterWaits,
        decode_prefill_tokens: int,
    ) -> None:
        """`decode_prefill_tokens`: see `RoleRouter`."""
        self.roles = RoleRouter(handovers, links, self._queue_of, decode_prefill_tokens)
        self.is_needed = False  # there are several groups, or were: sequences may be in a group's queue
        self.routes = False  # `route` has a choice: groups without KV take what waits when they have room
        self._waiting, self._policy = waiting, waiting.policy
        self._groups, self._acceptance, self._handovers = groups, acceptance, handovers
        self._adapter_waits = adapter_waits
        self._queues: dict[int, GroupQueue] = {}
        self._nonempty: dict[int, GroupQueue] = {}  # the ones in which sequences may wait
        self._round = 0  # number of calls of `route`
        self._is_bypassed = False  # groups take any sequence, whatever their role

    def on_groups_changed(self) -> bool:
        """Called when a group was attached or detached. Returns whether the groups had different roles before."""
        had_roles = self.roles.is_active
        self.roles.set_groups(self._groups.values())
        self.routes = len(self._groups) > 1 and any(group.has_kv for group in self._groups.values())
        self.is_needed = self.is_needed or self.routes
        return had_roles

    def lacking(self, adapters: Adapters) -> int | None:
        """The adapter that sequences with these wait for; None: they need nothing but room."""
        if self.roles.is_active and not self._is_bypassed:
            return self.roles.lacking(adapters)
        return first_lacking(adapters, self._groups.values())

    def requeue_all(self) -> None:
        """Empties all group queues into the waiting queue, which groups take sequences from until the next `route`."""
        self._is_bypassed = True
        for queue in self._queues.values():
            queue.requeue(self._waiting, self._handovers)

    def route(self) -> list[WorkerGroup]:
        """Moves waiting sequences to group queues while there is room. Returns the groups that got any."""
        self._is_bypassed = False
        self._round += 1
        chosen = self._queue_arrived() if self._handovers.arrived else []
        if len(self._groups) < 2 or (first := self._next()) is None:
            return chosen
        gives_way = not first.request.is_batch_line
        for worker, queue in list(self._nonempty.items()):
            queue.refresh(self._round)
            self._requeue_stalled(queue)
            if gives_way and queue.ends_with_batch_line:
                queue.requeue_batch_lines(self._waiting)
                queue.refresh(self._round)
            if not queue.entries:
                del self._nonempty[worker]
        if self.roles.is_active:
            return [*chosen, *self._route_to_roles()]
        queues = [queue for group in self._groups.values() if not (queue := self._queue_of(group)).is_full]
        while queues and (sequence := self._next()) is not None:
            best = self._best(queues, sequence)
            if best is None and sequence.request.adapters:
                queues = [queue for queue in queues if not queue.group.holds(sequence.request)]
                self._set_aside(sequence, [queue.group for queue in queues])
                continue
            if best is None:
                break
            queue, num_tokens, num_blocks = best
            self._add(queue, sequence, num_tokens, num_blocks)
            chosen.append(queue.group)
            if queue.is_full:
                queues.remove(queue)
        return chosen

    def _route_to_roles(self) -> list[WorkerGroup]:
        chosen: list[WorkerGroup] = []
        self.roles.begin_round()
        while (sequence := self._next()) is not None:
            placement, adapters = self.roles.place(sequence), sequence.request.adapters
            if placement is not None:
                self._add(placement.queue, sequence, placement.num_tokens, placement.num_blocks)
                chosen.append(placement.queue.group)
            elif adapters and (left := self.roles.close(sequence.request)):
                self._set_aside(sequence, left)
            else:
                break
        return chosen

    def _set_aside(self, sequence: Sequence, left: list[WorkerGroup]) -> None:
        """The groups with its adapters have no room for a sequence. Others may go to the groups that are left."""
        lacking = first_lacking(sequence.request.adapters, left)
        assert lacking is not None, "none of these groups holds its adapters"
        self._adapter_waits.defer(sequence, lacking)

    def next(self, group: WorkerGroup) -> Sequence | None:
        """The next sequence for this group: from its queue, else from the waiting queue."""
        queue = self._queues.get(group.worker)
        if queue is not None:
            while queue.entries and not queue.entries[0].waits:
                queue.entries.pop(0)
            if queue.entries:
                return queue.entries[0].sequence
        return self._waiting.peek() if self._is_bypassed or not self.roles.is_active else None

    def reserve(self, group: WorkerGroup, sequence: Sequence) -> None:
        """Routes a sequence to the group where others were preempted for it: it is to preempt none elsewhere."""
        if len(self._groups) > 1 and not sequence.is_set_aside:
            self._add(
                self._queue_of(group),
                sequence,
                sequence.num_tokens,
                group.kv_cache.num_blocks_to_take(sequence.num_tokens, _NOTHING, alone=not group.running),
            )

    def remove_group(self, group: WorkerGroup) -> None:
        """Requeues the sequences of a lost group."""
        queue = self._queues.pop(group.worker, None)
        self._nonempty.pop(group.worker, None)
        if queue is not None:
            queue.requeue(self._waiting, self._handovers)

    def _queue_arrived(self) -> list[WorkerGroup]:
        """Sequences go to the group in which their blocks have landed. Returns these groups."""
        chosen: list[WorkerGroup] = []
        for sequence, group in self._handovers.take_arrived():
            queue = self._queue_of(group)
            num_tokens, _, found = queue.find(sequence)
            num_blocks = group.kv_cache.num_blocks_to_take(sequence.num_tokens, found, alone=not group.running)
            self._add(queue, sequence, num_tokens, num_blocks)
            chosen.append(group)
        return chosen

    def _next(self) -> Sequence | None:
        """The next waiting sequence, if it may be scheduled now. Skips sequences if no group has their adapter."""
        sequence = self._waiting.peek()
        while sequence is not None and (adapters := sequence.request.adapters):
            if (lacking := self.lacking(adapters)) is None:
                break
            self._adapter_waits.defer(sequence, lacking)
            sequence = self._waiting.peek()
        if sequence is None or sequence.awaits_results() or not self._acceptance.can_accept(sequence.request):
            return None
        return sequence

    def _queue_of(self, group: WorkerGroup) -> GroupQueue:
        """Its counts are up to date. Of many groups only some are compared in a round, and only these are counted."""
        queue = self._queues.get(group.worker)
        if queue is None:
            queue = self._queues[group.worker] = GroupQueue(group)
        elif queue.unfinished and queue.counted_in != self._round:
            queue.refresh(self._round)
        return queue

    def _best(self, queues: list[GroupQueue], sequence: Sequence) -> tuple[GroupQueue, int, int] | None:
        """The group queue of the lowest cost, with the tokens and blocks to take there; None if no group has room."""
        best, lowest = None, None
        known, size, first = sequence.num_tokens, 0, None
        near = sibling_groups(sequence)
        own = max(1, known - sequence.request.num_prompt)  # tokens that other sequences of the request do not compute
        request = sequence.request
        for queue in queues:
            if request.adapters and not queue.group.holds(request):
                continue
            pool = queue.group.kv_cache.blocks
            if pool.block_size != size:
                size, first = pool.block_size, queue.group.kv_cache.first_hash(sequence)
            num_tokens, backlog, found = known, queue.backlog, _NOTHING
            if first is not None and (
                queue.group.kv_cache.may_have_cached(first) or (queue.unfinished and queue.will_cache(first))
            ):
                num_tokens, backlog, found = queue.find(sequence)
            elif queue.group.worker in near:
                num_tokens = own
            elif queue.is_busy:
                continue
            extra = TOO_LONG if known >= queue.group.max_model_len else 0
            extra += place_cost(queue.group, request.adapter)
            price = cost(num_tokens, backlog + extra, len(queue.group.running) + len(queue.entries))
            if lowest is not None and price >= lowest:
                continue
            num_blocks = queue.group.kv_cache.num_blocks_to_take(known, found, alone=not queue.group.running)
            if pool.admits(num_blocks + queue.num_blocks, found.blocks, alone=not queue.num_sequences):
                best, lowest = (queue, num_tokens, num_blocks), price
        return best

    def _add(self, queue: GroupQueue, sequence: Sequence, num_tokens: int, num_blocks: int) -> None:
        key = self._policy.key(sequence)
        self._waiting.set_aside(sequence)
        self._nonempty[queue.group.worker] = queue
        queue.add(
            RoutedSequence(sequence, sequence.ticket, key, num_tokens, num_blocks, queue.group.plan_clock.last_sent)
        )

    def _requeue_stalled(self, queue: GroupQueue) -> None:
        """Requeues sequences that were not scheduled in MAX_PLANS_WAITED plans."""
        sent = queue.group.plan_clock.last_sent
        if queue.entries and sent - min(routed.since for routed in queue.entries) > MAX_PLANS_WAITED:
            queue.requeue(self._waiting, self._handovers)
            queue.refresh(self._round)
