"""What must hold: of the core's state after every step, and of the outputs in the end."""

from collections import Counter

import pytest

from blockyard.services.gpu_worker.mock.batch import Pattern
from blockyard.services.scheduler.batch.worker_groups import WorkerGroup
from blockyard.services.scheduler.core import Scheduler
from blockyard.services.scheduler.kv_cache.free_block_queue import SLACK, FreeBlockQueue
from blockyard.services.scheduler.lifecycle.parallel_sampling import _computes_prompt
from blockyard.services.scheduler.plan_pacer import PlanClock
from blockyard.services.scheduler.queue.fair_policy import FairPolicy
from blockyard.services.scheduler.sequences.requests import Phase, QueueAmount, Sequence
from blockyard.shared.messages import FinishReason

from .beam_reference import beam_reference
from .fakes import Journal, ids_list

EOS = 7


def check_tokens(journal: Journal, pattern: Pattern, max_model_len: int) -> None:
    """Ids, log-probabilities and the reason of the end are those that an undisturbed run would have."""
    prompt = ids_list(journal.frame.prompt_ids)
    sampling = journal.frame.sampling
    room = min(sampling.max_tokens, max_model_len - len(prompt))
    if journal.frame.beam is not None:
        check_beams(journal, pattern, max_model_len)
        return
    for index, out in journal.outputs.items():
        name = f"{journal.frame.request_id}/{index}"
        expected = [pattern.token(sampling, index, len(prompt) + i, prompt, [EOS]) for i in range(len(out.ids))]
        assert out.ids == expected, name
        assert EOS not in out.ids[:-1], f"{name} went on after its end"
        assert len(out.ids) <= max(room, 0), name
        if out.finish is FinishReason.LENGTH:
            assert len(out.ids) == room, name
        elif out.finish is FinishReason.FAILED:
            too_long = len(prompt) + min(1, sampling.max_tokens) > max_model_len
            broke = out.detail.startswith("workers broke")
            assert too_long or broke, f"{name}: {out.detail}"
        if sampling.num_logprobs is not None:
            assert [p.token_id for p in out.logprobs] == out.ids, name
        if (
            sampling.num_prompt_logprobs is not None
            and not journal.cancelled
            and (out.ids or out.finish is FinishReason.LENGTH)
        ):
            outs = journal.outputs.values()  # one of them computed the prompt
            found = {p: logprobs.token_id for out in outs for p, logprobs in out.prompt_logprobs.items()}
            assert found == dict(enumerate(prompt[1:], 1)), name


def check_beams(journal: Journal, pattern: Pattern, max_model_len: int) -> None:
    """What the search finds where nothing disturbs it."""
    frame = journal.frame
    if len(ids_list(frame.prompt_ids)) >= max_model_len:
        return
    best = beam_reference(frame, pattern, [EOS], max_model_len)
    for index, out in journal.outputs.items():
        name = f"{frame.request_id}/{index}"
        if out.finish not in (FinishReason.STOP, FinishReason.LENGTH):
            assert not out.ids, f"{name} was told before it was over"
            broke = out.detail.startswith("workers broke")
            assert out.finish is None or broke, f"{name}: {out.detail}"
            continue
        assert (out.ids, out.finish) == (best[index].hypothesis.outputs.tolist(), best[index].finish), name
        if frame.sampling.num_logprobs is not None:
            assert [p.token_id for p in out.logprobs] == out.ids, name
            assert sum(p.logprob for p in out.logprobs) == pytest.approx(best[index].hypothesis.total)


def check_blocks(group: WorkerGroup) -> None:
    """Each block is in one place, and whoever holds it is counted; what has a name has one."""
    pool, index = group.kv_cache.blocks, group.kv_cache.blocks.index
    held = Counter(b for seat in group.running for b in seat.table.blocks[seat.table.num_freed :])
    assert [held[b] for b in range(pool.num_ids)] == pool._holders, "holders are miscounted"
    for seat in group.running:
        assert len(set(seat.table.blocks[seat.table.num_freed :])) == len(seat.table.blocks) - seat.table.num_freed
        assert seat.table.num_freed <= group.kv_cache.window.num_skipped_blocks(seat.num_computed_tokens)
    shared = {b for b, count in held.items() if count > 1}
    for seat in group.running:
        written_prompts = seat.num_scheduled_tokens + 1  # its last position may be repeated
        assert shared.isdisjoint(seat.table.blocks[written_prompts // pool.block_size :]), (
            "one that is shared is still written"
        )
    resting = [i for _, ids in pool.uncached._pending for i in ids]
    assert len(resting) == pool.uncached.num_pending
    check_free_queue(index.free_queue, group.plan_clock)
    shelved = [block for block, _ in index.free_queue.in_order()]
    places = pool.uncached._free + resting + shelved + list(held)
    assert sorted(places) == list(range(pool.num_ids)), "a block is lost or in two places"
    assert pool.num_free + pool.num_pending + pool.num_used == pool.num_ids
    assert pool.num_used == len(held)
    assert {b: n for n, b in index._block_of.items()} == index._hash_of
    assert set(shelved) <= index._hash_of.keys() <= set(places) - {*pool.uncached._free}
    check_host(group)


def check_free_queue(free_queue: FreeBlockQueue, plan_clock: PlanClock) -> None:
    """Blocks are counted, those that cool are so for a plan in flight, and no batch outlives its blocks."""
    assert Counter(is_free for _, is_free in free_queue.in_order()) == +Counter(
        {True: free_queue.num_free, False: free_queue.num_pending}
    )
    plans = [batch.plan for batch in free_queue._pending]
    assert plans == sorted(plans)
    assert all(plan > plan_clock.last_completed for plan in plans)
    for batch in [*free_queue._free, *free_queue._pending]:
        own = [block for block in batch.blocks if free_queue._batch_of[block] is batch]
        assert len(own) == batch.num_blocks > 0
        assert len(batch.blocks) <= 2 * len(own) + SLACK


def check_host(group: WorkerGroup) -> None:
    """Each host block is in one place, and what is to be copied with the next plan has its name and its block."""
    host = group.kv_cache.blocks.host
    resting = [i for _, ids in host._ids._pending for i in ids]
    assert sorted(host._ids._free + resting + list(host._block_of.values())) == list(range(host.num_ids))
    for save in host.saves:
        assert host.get(save.block_hash) == save.host
        assert host._copied_by[save.host] > group.plan_clock.last_sent
    assert not host.fetches, "fetches leave with the plan that seats the choice"


def check_policy(core: Scheduler, waiting: list[Sequence]) -> None:
    """Somebody is next while anybody waits, and fair shares count who is there."""
    policy = core._lifecycle.waiting.policy
    head = policy.peek()
    assert (head is not None) == bool(waiting)
    assert head is None or head in waiting
    if not isinstance(policy, FairPolicy):
        assert head is None or policy.key(head) == min(policy.key(choice) for choice in waiting)
        return
    waits = Counter((c.request.frame.tenant, c.request.frame.user) for c in waiting)
    seats = [seat for group in core._groups.attached.values() for seat in group.running]
    runs = Counter((s.sequence.request.frame.tenant, s.sequence.request.frame.user) for s in seats)
    for tenant in policy.tenants.shares.values():
        for user in tenant.users.shares.values():
            name = (tenant.name, user.name)
            assert (user.num_waiting, user.num_running) == (waits.pop(name, 0), runs.pop(name, 0)), name
        assert tenant.num_waiting == sum(user.num_waiting for user in tenant.users.shares.values())
        assert tenant.num_running == sum(user.num_running for user in tenant.users.shares.values())
        assert tenant.users.num_active == sum(user.is_active for user in tenant.users.shares.values())
    assert not +waits
    assert not +runs


def check_router(core: Scheduler, is_held: list[Sequence]) -> None:
    """Each routed sequence is in the queue of one attached group, and no group idles while a sequence could run."""
    queues, groups = core._workers.router._queues, core._groups.attached
    assert all(groups.get(worker) is queue.group for worker, queue in queues.items())
    standing = [routed.sequence for queue in queues.values() for routed in queue.entries if routed.waits]
    assert len(standing) == len(is_held) and {*map(id, standing)} == {*map(id, is_held)}
    idle = [
        g for w, g in groups.items() if not g.running and not g.in_flight and not (w in queues and queues[w].entries)
    ]
    head = core._lifecycle.waiting.peek()
    ready = (
        head is not None and core._planner.prefills._acceptance.can_accept(head.request) and not head.awaits_results()
    )
    assert core._workers.admission_delay.paused or not (idle and ready), "a group idles"


def check_lane(group: WorkerGroup) -> None:
    """Who runs is in the lane or apart, and what the lane's lists say of its seats is so."""
    decode_batch = group.decode_batch
    rows = [outbox_rows.snapshot() for outbox_rows in decode_batch._rows_by_outbox.values()]
    inside = [seat for one in rows for seat in one.sequences]
    assert len(inside) == len(decode_batch)
    assert {*map(id, inside), *map(id, decode_batch.outside)} == {*map(id, group.running)}
    assert len(inside) + len(decode_batch.outside) == len(group.running)
    assert [s.key for s in decode_batch.outside] == sorted(s.key for s in decode_batch.outside)
    assert not any(map(decode_batch.has, decode_batch.outside))
    for text_outbox, outbox_rows in decode_batch._rows_by_outbox.items():
        now = outbox_rows.snapshot()
        choices = [seat.sequence for seat in now.sequences]
        assert now.sequences == [
            seat
            for seat in now.sequences
            if decode_batch.has(seat) and seat.sequence.request.text_outbox is text_outbox
        ]
        assert outbox_rows._row_of == {seat: i for i, seat in enumerate(now.sequences)}
        assert [run.slot for run in outbox_rows.runs] == [seat.slot for seat in now.sequences] == list(now.slots)
        assert all(outputs is choice.outputs for outputs, choice in zip(now.outputs, choices, strict=True))
        assert list(now.streams) == [choice.stream for choice in choices]
        assert now.accounts == Counter(c.request.account for c in choices if c.request.account is not None)
    size, progress = group.kv_cache.blocks.block_size, decode_batch._progress.num_scheduled_tokens
    assert decode_batch._due_step_of.keys() == set(inside)
    for seat, due_step in decode_batch._due_step_of.items():
        last = min(seat.table.capacity, seat.max_scheduled_tokens - 1)
        assert seat.prefill_end <= seat.num_scheduled_tokens <= last, "it has room for its tokens until it is looked at"
        assert progress <= due_step <= progress + last - seat.num_scheduled_tokens, (
            "nobody looks at it when it has no more"
        )
        assert due_step - progress <= size
        assert seat in decode_batch._due_steps[due_step]


def check(core: Scheduler) -> None:
    """Invariants of the core's state."""
    for group in core._groups.attached.values():
        assert len(group.running) <= group.max_num_seqs
        assert [s.key for s in group.running] == sorted(s.key for s in group.running)
        assert len(group.in_flight) <= group.depth + 1
        resting = [i for _, ids in group.slots._pending for i in ids]
        assert len(resting) == group.slots.num_pending
        used = [seat.slot for seat in group.running]
        assert sorted(group.slots._free + resting + used) == list(range(group.slots.num_ids)), "a slot is lost"
        check_blocks(group)
        check_lane(group)
        for seat in group.running:
            request = seat.sequence.request
            last = request.num_prompt + request.frame.sampling.max_tokens - 1  # is sampled, never computed
            assert seat.num_scheduled_tokens <= max(seat.prefill_end, min(last, group.max_model_len - 1))
            assert (
                seat.num_scheduled_tokens
                <= seat.table.capacity
                == len(seat.table.blocks) * group.kv_cache.blocks.block_size
            )
            assert (
                seat.num_scheduled_tokens - (seat.sequence.num_tokens - 1) <= group.depth + 1
                or seat.num_scheduled_tokens <= seat.prefill_end
            )
    waiting = [c for r in core._lifecycle.requests.values() for c in r.active_sequences if c.ticket]
    assert len(waiting) == len(core._lifecycle.waiting)
    held = {id(choice) for choice in core._planner.prefills.deferred.sequences()}
    check_policy(core, [choice for choice in waiting if not choice.is_held])
    check_router(core, [choice for choice in waiting if choice.is_held and id(choice) not in held])
    awaiting_prompt = [r for r in core._lifecycle.requests.values() if r.awaiting_prompt]
    assert sum(len(r.awaiting_prompt) for r in awaiting_prompt) == core._lifecycle.parallel_sampling.num_awaiting_prompt
    queued = [*waiting, *(c for r in awaiting_prompt for c in r.awaiting_prompt)]
    amounts = QueueAmount(sum(c.queue_amount.sequences for c in queued), sum(c.queue_amount.tokens for c in queued))
    assert amounts == core._lifecycle.waiting.usage.amount
    assert all(c.queue_amount == QueueAmount(c.num_beams, c.num_beams * c.num_tokens) for c in queued)
    assert core._lifecycle.waiting.output_limits.total() == amounts.sequences
    for request in awaiting_prompt:
        assert all(c in request.active_sequences and not c.ticket for c in request.awaiting_prompt)
        assert all(c.phase is Phase.WAITING and not c.awaits_results() for c in request.awaiting_prompt)
        assert any(_computes_prompt(c) for c in request.active_sequences), (
            "sequences wait for a prompt that no sequence computes"
        )
    live = core._lifecycle.streams.text_outboxes.values()
    assert all(r.text_outbox is None or r.text_outbox in live for r in core._lifecycle.requests.values())
    for text_outbox in live:
        bound = sum(len(r.sequences) for r in core._lifecycle.requests.values() if r.text_outbox is text_outbox)
        assert text_outbox.num_streams == bound
