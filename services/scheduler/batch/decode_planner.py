"""What a plan grants to those that run already: a token to each that decodes, and blocks for it."""

from blockyard.services.scheduler.batch.plan_builder import Draft
from blockyard.services.scheduler.kv_cache.prefix_cache import PrefixCache
from blockyard.services.scheduler.lifecycle import Lifecycle
from blockyard.services.scheduler.sequences.requests import Phase, Seat
from blockyard.services.scheduler.workers.worker_groups import WorkerGroup
from blockyard.shared.messages import SlotBlocks


class Decodes:
    def __init__(self, lifecycle: Lifecycle, prefix: PrefixCache) -> None:
        self._lifecycle, self._prefix = lifecycle, prefix

    def grant(self, group: WorkerGroup, draft: Draft) -> list[Seat]:
        """Grants each decoding seat one token, oldest first. Returns the seats that are in prefill.

        Those in the lane are in the plan once `in_step` is called.
        """
        lane = group.lane
        fits = len(group.running) <= draft.budget
        if not fits:
            lane.break_up()  # the oldest ones run
        elif len(lane):
            self._look(group, draft)
        prefills: list[Seat] = []
        for seat in lane.apart.copy():
            if seat.choice.phase is not Phase.RUNNING:
                continue  # preempted for one before it
            granted = seat.granted
            if granted < seat.prefill_end:
                if granted < seat.capacity or self._extend(group, draft, seat):
                    prefills.append(seat)
            elif granted < seat.ceiling and draft.budget:
                if granted == seat.capacity and not self._extend(group, draft, seat):
                    continue
                if fits and lane.takes(seat):
                    lane.join(seat, draft.record.number)
                else:
                    draft.decode(seat)
        draft.budget -= len(lane)
        return prefills

    def in_step(self, group: WorkerGroup, draft: Draft) -> None:
        """The lane runs in this plan, which is about to be sent."""
        if len(group.lane):
            runs, draft.record.rows = group.lane.advance(draft.record.number)
            draft.runs = runs + draft.runs

    def _look(self, group: WorkerGroup, draft: Draft) -> None:
        """Blocks for seats of the lane.

        Where they are scarce these seats are looked at with all others, in the order in which these get blocks.
        """
        lane, pool = group.lane, group.blocks
        is_scarce = pool.num_free < lane.num_due + len(lane.apart)
        at_end = draft.record.filled = lane.look(leave=is_scarce or group.window.size is not None)
        extended = [seat for seat in at_end if lane.has(seat) and seat.granted == seat.capacity]
        for seat, block in zip(extended, pool.take(len(extended)), strict=True):
            seat.blocks.append(block)
            seat.capacity += pool.block_size
            draft.blocks.append(SlotBlocks(seat.slot, [block]))

    def _extend(self, group: WorkerGroup, draft: Draft, seat: Seat) -> bool:
        """One more block for a seat. Where there is none, younger seats are preempted until enough will be free.

        What they held rests while plans are in flight: False means not in this plan.
        """
        pool = group.blocks
        if group.window.size is not None:
            self._prefix.hash_before_free(group, seat)
            group.free_outside_window(seat)
        block = pool.take_one()
        if block is None:
            draft.num_owed += 1
            while pool.num_free + pool.num_pending < draft.num_owed and group.running[-1] is not seat:
                self._lifecycle.preempt(group, group.running[-1])
            block = pool.take_one()
            if block is None:
                return False
            draft.num_owed -= 1
        seat.blocks.append(block)
        seat.capacity += pool.block_size
        draft.blocks.append(SlotBlocks(seat.slot, [block]))
        return True
