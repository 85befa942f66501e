"""One plan: decodes first, then prefills with what is left of the budget, then newcomers."""

from blockyard.services.scheduler.batch.admission_delay import Gate
from blockyard.services.scheduler.batch.decode_planner import Decodes
from blockyard.services.scheduler.batch.fair_step_limiter import ShortSteps
from blockyard.services.scheduler.batch.partial_prefill_limits import HeldBack, LongPrompts, PrefillShares
from blockyard.services.scheduler.batch.plan_builder import Draft
from blockyard.services.scheduler.batch.preemption import Preemption
from blockyard.services.scheduler.kv_cache.prefix_cache import PrefixCache, PrefixMatch
from blockyard.services.scheduler.lifecycle import Lifecycle
from blockyard.services.scheduler.queue.acceptance import Acceptance
from blockyard.services.scheduler.queue.policy import Policy
from blockyard.services.scheduler.queue.waiting_queue import WaitingQueue
from blockyard.services.scheduler.sequences.beam_sequences import Beams
from blockyard.services.scheduler.sequences.requests import Choice, Seat
from blockyard.services.scheduler.workers.router import Router
from blockyard.services.scheduler.workers.worker_groups import WorkerGroup
from blockyard.shared.messages import FinishReason, SlotBlocks, SlotStart, StepPlan

NO_CLASS = 1 << 62  # is above every class


class Planner:
    def __init__(
        self,
        scheduler: int,
        waiting: WaitingQueue,
        lifecycle: Lifecycle,
        prefix: PrefixCache,
        policy: Policy,
        acceptance: Acceptance,
        placement: Router,
        beams: Beams,
        gate: Gate,
        shares: PrefillShares,
    ) -> None:
        self.preemption = Preemption(placement, policy, lifecycle, prefix)
        self._scheduler, self._waiting, self._lifecycle, self._prefix = scheduler, waiting, lifecycle, prefix
        self._policy, self._router, self._acceptance, self._forks = policy, placement, acceptance, beams.forks
        self._beams, self._gate, self._shares = beams, gate, shares
        self._held, self._short = HeldBack(waiting), ShortSteps(policy)
        self._decodes = Decodes(lifecycle, prefix)

    def plan(self, group: WorkerGroup) -> StepPlan | None:
        """The next plan of a group, or None if nothing can run in it now."""
        if self._gate.frozen:
            return None
        self._prefix.hash_full_blocks(group)
        if (choice := self._next(group)) is not None:
            self.preemption.make_way(group, choice)
        draft = Draft(group.plan_clock.last_sent + 1, group.max_num_batched_tokens)
        restarts = [(seat, _slot_start(group, seat)) for seat in group.restarts]
        decodes = self._share_out(group, draft, choice)
        relieved = self._beams.relieve(group)
        if decodes:
            self._decodes.in_step(group, draft)
        if not draft.runs:
            return self.plan(group) if relieved else None
        self._restart(group, draft, restarts)
        ends, group.slots_to_end = group.slots_to_end, []
        draft.record.runs = draft.runs
        group.on_sent(draft.record)
        if draft.copies:
            group.blocks.release([copy.src for copy in draft.copies], ())  # they rest until this plan's result is in
        for name, block in draft.fills.items():
            group.blocks.index.insert(block, name)
        for request in draft.written:
            self._forks.written(request)
        names, number = self._prefix.take_new_cached_blocks(group), draft.record.number
        saves, fetches = group.blocks.host.take()
        changes = (draft.starts, draft.blocks, draft.runs, names, saves, fetches, draft.copies)
        return StepPlan(self._scheduler, number, ends, *changes)

    def _share_out(self, group: WorkerGroup, draft: Draft, choice: Choice | None) -> bool:
        """Decodes first, but perhaps none if `choice`, who is next, goes before others; no prompts of theirs then.

        Returns whether there are decodes.
        """
        goes_first = choice is not None and self._short.goes_first(group, choice)
        goes_alone = goes_first and self._short.goes_alone(group)
        seats = [] if goes_alone else self._decodes.grant(group, draft)
        if choice is not None and goes_first:
            self._prefills(group, draft, [], self._policy.key(choice)[0] + 1)
            if draft.starts:
                group.last_fair_plan = draft.record.number
                return not goes_alone
        self._prefills(group, draft, self._decodes.grant(group, draft) if goes_alone else seats)
        return True

    def _prefills(self, group: WorkerGroup, draft: Draft, seats: list[Seat], below: int = NO_CLASS) -> None:
        """What decodes left goes to prompts under way, then to newcomers; lower classes first, long ones last."""
        longs = LongPrompts(self._shares, draft.budget)
        shorts: list[Seat] = []
        for seat in seats:
            if self._shares.is_long(group, seat.prefill_end - seat.granted):
                longs.add(seat)
            else:
                shorts.append(seat)
        for seat in shorts:
            self._newcomers(group, draft, longs, seat.key[0])
            if (room := self._room(group, draft, longs, seat.choice)) > 0:
                self._prefill(group, draft, seat, room)
        self._newcomers(group, draft, longs, below)
        for seat, num_tokens in longs.divide(draft.budget):
            if (room := self._room(group, draft, None, seat.choice)) > 0:
                self._prefill(group, draft, seat, min(num_tokens, room))

    def _room(self, group: WorkerGroup, draft: Draft, longs: LongPrompts | None, choice: Choice) -> int:
        """Tokens of the step for this one's prompt; 0 or less: none."""
        room = draft.budget - (longs.reserved if longs is not None else 0)
        if self._shares.whole:
            return room
        return min(room, self._short.most_tokens(group, choice) - sum(draft.record.chunks.values()))

    def _prefill(self, group: WorkerGroup, draft: Draft, seat: Seat, most: int) -> None:
        num_tokens = min(seat.prefill_end - seat.granted, most)
        if seat.granted + num_tokens > seat.capacity:
            num_tokens = self._reach(group, draft, seat, num_tokens)
        draft.grant(seat, num_tokens)
        for name, block in self._prefix.blocks_filled_by_plan(group, seat).items():
            draft.fills.setdefault(name, block)
        if seat.granted == seat.prefill_end and len(seat.choice.request.members) > 1:
            draft.written.append(seat.choice.request)

    def _reach(self, group: WorkerGroup, draft: Draft, seat: Seat, num_tokens: int) -> int:
        """Blocks for so many more tokens of a prompt, or for as many as there are free blocks. Returns the tokens."""
        pool = group.blocks
        self._prefix.hash_before_free(group, seat)
        group.free_outside_window(seat)
        missing = pool.blocks_for(seat.granted + num_tokens) - len(seat.blocks)
        taken = pool.take(min(missing, pool.num_free))
        if taken:
            seat.blocks += taken
            seat.capacity += len(taken) * pool.block_size
            draft.blocks.append(SlotBlocks(seat.slot, taken))
        return min(num_tokens, seat.capacity - seat.granted)

    def _next(self, group: WorkerGroup) -> Choice | None:
        """Who is to be seated next, if anybody may be now."""
        choice = self._gate.first(group) or self._router.next(group)
        if choice is None or choice.awaits_results() or not self._acceptance.can_accept(choice.request):
            return None
        return choice if self._gate.is_open(choice.request, group) else None

    def _newcomers(self, group: WorkerGroup, draft: Draft, longs: LongPrompts, below: int) -> None:
        """Seats those of lower classes, in order, and never past one who does not fit yet, unless it is long."""
        if longs.take_more():
            self._held.release()
        while draft.budget > longs.reserved and not draft.num_owed:
            choice = self._next(group)
            if choice is None or self._policy.key(choice)[0] >= below:
                return
            budget = self._room(group, draft, longs, choice)
            if self._over(group, choice):
                continue
            if budget <= 0 or not group.can_schedule:
                return
            found = self._forks.find(group, draft.record, choice, self._prefix.find(group, choice))
            if found is None:
                continue
            if found.next_hash in draft.fills:
                return  # this plan computes what the next one will find
            num_tokens = choice.known - found.num_tokens
            is_long = self._shares.is_long(group, num_tokens)
            if is_long and not longs.take_more():
                self._held.hold(choice)
                continue
            num_blocks = group.num_blocks_to_take(
                choice.known, found.num_tokens, found.num_skipped, found.blocks
            )  # some to be fetched
            if not group.blocks.admits(num_blocks, found.blocks, alone=not group.running):
                return
            if num_tokens > budget and not longs.leave_part(min(num_tokens, group.max_num_batched_tokens) > budget):
                return
            seat = self._seat(group, draft, choice, found, num_blocks)
            draft.starts.append(_slot_start(group, seat))
            if is_long:
                longs.add(seat)
            else:
                self._prefill(group, draft, seat, budget)

    def _seat(self, group: WorkerGroup, draft: Draft, choice: Choice, found: PrefixMatch, num_blocks: int) -> Seat:
        """The caller has looked at free slots and blocks."""
        self._acceptance.accept(choice.request)
        self._waiting.dequeue(choice)
        self._gate.seated(choice)
        choice.key = self._policy.key(choice)
        self._policy.on_scheduled(choice, choice.known - found.num_tokens if choice.num_cached is None else 0)
        found.host_blocks = group.blocks.host.pin(list(found.host_hashes.values()))
        if found.copy_from is not None:
            found.copy_from = draft.source_of(found.copy_from)
            group.blocks.share([found.copy_from])  # nobody may get it before this plan has been sent
        seat = group.schedule(choice, num_blocks, found.blocks)
        self._prefix.on_scheduled(group, seat, found)
        if found.copy_from is not None:
            draft.copy(found.copy_from, seat.blocks[seat.num_found])
        return seat

    def _over(self, group: WorkerGroup, choice: Choice) -> bool:
        """Ends a choice that has all its tokens or can never run here."""
        sampling = choice.request.frame.sampling
        num_prompt = choice.request.num_prompt
        if choice.outputs and choice.known >= min(num_prompt + sampling.max_tokens, group.max_model_len):
            self._acceptance.accept(choice.request)
            if choice.hypothesis is None:
                self._lifecycle.conclude(choice, FinishReason.LENGTH)
            else:
                self._lifecycle.fail(choice, f"the worker that is left takes {group.max_model_len} tokens")
        elif num_prompt + min(1, sampling.max_tokens) > group.max_model_len:
            detail = f"the prompt has {num_prompt} tokens, the worker that is left takes {group.max_model_len}"
            self._acceptance.accept(choice.request)
            self._lifecycle.fail(choice, detail)
        else:
            return False
        return True

    def _restart(self, group: WorkerGroup, draft: Draft, restarts: list[tuple[Seat, SlotStart]]) -> None:
        """Seats that stay where they are and go on with another token than their worker has."""
        group.restarts.clear()
        for seat, start in restarts:
            if seat in group.running:  # not preempted since
                group.slots_to_end.append(seat.slot)
                draft.starts.append(start)


def _slot_start(group: WorkerGroup, seat: Seat) -> SlotStart:
    """As of now: before this plan grants it anything."""
    choice, request = seat.choice, seat.choice.request
    sampling = request.frame.sampling
    if request.search is not None:
        sampling = request.search.sampling(sampling, group.geometry.eos_token_ids)
    return SlotStart(
        seat.slot,
        request.frame.prompt_ids + choice.outputs.tobytes(),
        request.num_prompt,
        num_computed=seat.granted,
        blocks=list(seat.blocks),
        sampling=sampling,
        choice=choice.index,
        prompt_logprobs_from=choice.prompt_next,
    )
