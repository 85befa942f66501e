"""Invariants of the core's state after every step, and of the outputs at the end."""

from collections import Counter

import pytest

from blockyard.services.gpu_worker.mock.batch import Pattern
from blockyard.services.scheduler.batch.decode_batch import DecodeBatch
from blockyard.services.scheduler.batch.pipeline_turns import PipelineTurns
from blockyard.services.scheduler.batch.worker_groups import WorkerGroup
from blockyard.services.scheduler.core import Scheduler
from blockyard.services.scheduler.kv_cache.free_block_queue import SLACK, FreeBlockQueue
from blockyard.services.scheduler.lifecycle.parallel_sampling import _computes_prompt
from blockyard.services.scheduler.plan_pacer import PlanClock
from blockyard.services.scheduler.queue.fair_policy import FairPolicy
from blockyard.services.scheduler.queue.policy import BatchLinesLast
from blockyard.services.scheduler.sequences.handover import Handover
from blockyard.services.scheduler.sequences.requests import Phase, QueueAmount, RunningSequence, Sequence
from blockyard.services.scheduler.transfers.handovers import NOT_LANDED
from blockyard.shared.messages import FinishReason

from .beam_reference import beam_reference, known_prompt
from .fakes import Journal, ids_list

EOS = 7
FAULTS = "workers broke", NOT_LANDED, "no worker can read the adapter"  # details of requests that may fail


def check_tokens(journal: Journal, pattern: Pattern, max_model_len: int) -> None:
    """Ids, log-probabilities and finish reasons equal those of an undisturbed run."""
    asked, prompt = ids_list(journal.frame.prompt_ids), known_prompt(journal.frame)
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
            broke = out.detail.startswith(FAULTS)
            assert too_long or broke, f"{name}: {out.detail}"
        if sampling.num_logprobs is not None:
            assert [p.token_id for p in out.logprobs] == out.ids, name
        if (
            sampling.num_prompt_logprobs is not None
            and not journal.cancelled
            and (out.ids or out.finish is FinishReason.LENGTH)
        ):
            outs = journal.outputs.values()  # one of the choices computed the prompt
            found = {p: logprobs.token_id for out in outs for p, logprobs in out.prompt_logprobs.items()}
            assert found == dict(enumerate(asked[1:], 1)), name


def check_beams(journal: Journal, pattern: Pattern, max_model_len: int) -> None:
    """Hypotheses equal those of an undisturbed search."""
    frame = journal.frame
    if len(known_prompt(frame)) >= max_model_len:
        return
    best = beam_reference(frame, pattern, [EOS], max_model_len)
    for index, out in journal.outputs.items():
        name = f"{frame.request_id}/{index}"
        if out.finish not in (FinishReason.STOP, FinishReason.LENGTH):
            assert not out.ids, f"{name} was told before it was over"
            broke = out.detail.startswith(FAULTS)
            assert out.finish is None or broke, f"{name}: {out.detail}"
            continue
        assert (out.ids, out.finish) == (best[index].hypothesis.outputs.tolist(), best[index].finish), name
        if frame.sampling.num_logprobs is not None:
            assert [p.token_id for p in out.logprobs] == out.ids, name
            assert sum(p.logprob for p in out.logprobs) == pytest.approx(best[index].hypothesis.total)


def live_handovers(core: Scheduler) -> list[Handover]:
    sequences = (c for r in core.lifecycle.requests.values() for c in r.active_sequences)
    return [c.handover for c in sequences if c.handover is not None]


def held_by_transfers(core: Scheduler, worker: int) -> Counter[int]:
    """Blocks that transfers and handovers hold."""
    reserved = Counter(b for h in live_handovers(core) if h.target == worker for b in h.held_blocks)
    ends = (end for one in core.ledger.transfers.values() for end in one.ends if end.worker == worker)
    return Counter(b for end in ends for b in end.held_blocks) + reserved


def check_handovers(core: Scheduler) -> None:
    """Each handover is of one live sequence, and arriving sequences are counted."""
    handovers = core.handovers
    sequences = [c for r in core.lifecycle.requests.values() for c in r.active_sequences]
    waiting = [c for c in sequences if c.handover is not None and c.phase is Phase.WAITING]
    assert all(c.is_set_aside for c in waiting), "room is reserved for a sequence that other ones may have to wait for"
    arriving = [c for c in sequences if c.phase is Phase.ARRIVING]
    assert len(arriving) == handovers.num_arriving
    for sequence in arriving:
        assert sequence.handover is not None and sequence.handover.is_prefilled and not sequence.ticket
    live = live_handovers(core)
    assert len({id(handover) for handover in live}) == len(live), "two sequences have one handover"
    inbound = Counter(h.target for h in live for _ in range(h.num_sequences))
    assert +handovers.num_inbound == inbound
    for handover in live:
        assert handover.target in core.groups
        assert handover.source != handover.target


def check_adapters(core: Scheduler, group: WorkerGroup) -> None:
    """Each place counts its sequences and those on their way to it, and no adapter is in two."""
    places = group.adapters._places
    inbound = [h.adapter_place for h in live_handovers(core) if h.target == group.worker]
    used = Counter(place for place in [*(one.adapter_place for one in group.running), *inbound] if place is not None)
    assert [place.num_sequences for place in places] == [used[i] for i in range(len(places))]
    assert {one.adapter: i for i, one in enumerate(places) if one.adapter is not None} == group.adapters._place_of
    assert len(group.adapters._held) <= group.geometry.num_host_adapters + 1  # one that is checked


def check_blocks(core: Scheduler, group: WorkerGroup) -> None:
    """Each block is in one place, its holders are counted, and its hash belongs to no other block."""
    transferred = held_by_transfers(core, group.worker)
    pool, index = group.kv_cache.blocks, group.kv_cache.blocks.index
    held = Counter(b for running in group.running for b in running.table.blocks[running.table.num_freed :])
    held += transferred
    assert [held[b] for b in range(pool.num_ids)] == pool._holders, "holders are miscounted"
    for running in group.running:
        assert (
            len(set(running.table.blocks[running.table.num_freed :]))
            == len(running.table.blocks) - running.table.num_freed
        )
        assert running.table.num_freed <= group.kv_cache.num_skipped_blocks(running.num_computed_tokens)
    shared = {b for b, count in held.items() if count > 1}
    for running in group.running:
        written_prompts = running.num_scheduled_tokens + 1  # its last position may be repeated
        assert shared.isdisjoint(running.table.blocks[written_prompts // pool.block_size :]), (
            "a shared block is still written"
        )
    pending = [i for _, ids in pool.uncached._pending for i in ids]
    assert len(pending) == pool.uncached.num_pending
    check_free_queue(index.free_queue, group.plan_clock)
    cached = [block for block, _ in blocks_in_order(index.free_queue)]
    places = pool.uncached.free_ids() + pending + cached + list(held)
    assert sorted(places) == list(range(pool.num_ids)), "a block is lost or in two places"
    assert pool.num_free + pool.num_pending + pool.num_used == pool.num_ids
    assert pool.num_used == len(held)
    assert {b: n for n, b in index._block_of.items()} == index._hash_of
    assert set(cached) <= index._hash_of.keys() <= set(places) - {*pool.uncached.free_ids()}
    check_host(group)


def blocks_in_order(free_queue: FreeBlockQueue) -> list[tuple[int, bool]]:
    """All blocks in the order of eviction, and whether they are free."""
    batches, batch_of = [*free_queue._free, *free_queue._pending], free_queue._batch_of
    return [(b, batch.is_free) for batch in batches for b in reversed(batch.blocks) if batch_of[b] is batch]


def check_free_queue(free_queue: FreeBlockQueue, plan_clock: PlanClock) -> None:
    """Counts of blocks are right, pending blocks wait for a plan in flight, and no batch outlives its blocks."""
    assert Counter(is_free for _, is_free in blocks_in_order(free_queue)) == +Counter(
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
    """Each host block is in one place, and each save of the next plan has its hash and its host block."""
    host = group.kv_cache.blocks.host
    pending = [i for _, ids in host._ids._pending for i in ids]
    assert sorted(host._ids.free_ids() + pending + list(host._block_of.values())) == list(range(host.num_ids))
    for save in host.saves:
        assert host.get(save.block_hash) == save.host
        assert host._copied_by[save.host] > group.plan_clock.last_sent
    assert not host.fetches, "fetches are sent with the plan that starts the sequence"


def check_policy(core: Scheduler, waiting: list[Sequence]) -> None:
    """A sequence is next while any waits, and fair shares count the waiting and the running sequences."""
    policy = core.waiting.policy
    first = policy.peek()
    assert (first is not None) == bool(waiting)
    assert first is None or first in waiting
    assert isinstance(policy, BatchLinesLast)
    assert first is None or not first.request.is_batch_line or all(c.request.is_batch_line for c in waiting)
    fair = policy.online
    if not isinstance(fair, FairPolicy) or (first is not None and first.request.is_batch_line):
        assert first is None or policy.key(first) == min(policy.key(choice) for choice in waiting)
        return
    waits = Counter((c.request.frame.tenant, c.request.frame.user) for c in waiting if not c.request.is_batch_line)
    everything = [running for group in core.groups.values() for running in (*group.running, *group.packed_in_flight())]
    all_running = [running for running in everything if not running.sequence.request.is_batch_line]
    runs = Counter((s.sequence.request.frame.tenant, s.sequence.request.frame.user) for s in all_running)
    for tenant in fair.tenants.shares.values():
        for user in tenant.users.shares.values():
            name = (tenant.name, user.name)
            assert (user.num_waiting, user.num_running) == (waits.pop(name, 0), runs.pop(name, 0)), name
        assert tenant.num_waiting == sum(user.num_waiting for user in tenant.users.shares.values())
        assert tenant.num_running == sum(user.num_running for user in tenant.users.shares.values())
        assert tenant.users.num_active == sum(user.is_active for user in tenant.users.shares.values())
    assert not +waits
    assert not +runs


def check_router(core: Scheduler, set_aside: list[Sequence]) -> None:
    """Each routed sequence is in the queue of one attached group, and no group idles while a sequence could run."""
    queues, groups = core.router._queues, core.groups
    assert all(groups.get(worker) is queue.group for worker, queue in queues.items())
    routed_sequences = [routed.sequence for queue in queues.values() for routed in queue.entries if routed.waits]
    assert len(routed_sequences) == len(set_aside) and {*map(id, routed_sequences)} == {*map(id, set_aside)}
    idle = [
        g for w, g in groups.items() if not g.running and not g.in_flight and not (w in queues and queues[w].entries)
    ]
    first = core.waiting.peek()
    ready = first is not None and core.acceptance.can_accept(first.request) and not first.awaits_results()
    if core.router.roles.is_active or core.ledger.transfers:
        return  # a group waits for sequences that are routed to it, or for blocks
    if any(one.request.adapter is not None for one in core.quarantine.probations.values()):
        return  # a group waits for the adapter of a sequence that it has to run alone
    assert core.controls.paused or not (idle and ready), "a group idles"


def _amount(sequences: list[Sequence]) -> QueueAmount:
    pools = {c.request.pool.id for c in sequences if c.request.pool is not None and not c.request.pool.is_later}
    amounts = [c.queue_amount for c in sequences]
    entries = len(pools) + sum(one.entries for one in amounts)
    return QueueAmount(sum(one.sequences for one in amounts), sum(one.tokens for one in amounts), entries)


def check_texts(core: Scheduler) -> None:
    """Each text of a request to an encoder that has no result waits or is in one step, and steps keep their budget."""
    runs = [run for group in core.groups.values() for run in group.packed_in_flight()]
    for request in core.lifecycle.requests.values():
        if (texts := request.texts) is None:
            continue
        own = [run.texts for run in runs if run.sequence.request is request]
        assert {*map(id, own)} == {*map(id, texts.in_flight)} and len(own) == len(texts.in_flight)
        slices = [*texts._waiting, *own]
        indexes = [index for one in slices for index in one.indexes]
        assert indexes and len(indexes) == len(set(indexes)), "a text is in two places"
        assert texts.num_texts == sum(len(one.indexes) for one in texts._waiting)
        assert texts.num_tokens == sum(len(one.token_ids) // 4 for one in texts._waiting)
    for group in core.groups.values():
        for record in group.in_flight if not group.has_kv else ():
            tokens = sum(len(run.texts.token_ids) // 4 for run in record.packed)
            assert tokens <= group.max_num_batched_tokens or record.packed_amount.sequences == 1


def check_searches(core: Scheduler) -> None:
    """No beam keeps its blocks in a group without plans in flight while its search awaits no result."""
    if core.controls.frozen:
        return
    still = {running.sequence for g in core.groups.values() if not g.in_flight for running in g.running}
    for request in core.lifecycle.requests.values():
        beams = request.search.beams if request.search is not None else []
        has_idle = any(beam in still and beam.hypothesis is not None and beam.hypothesis.top for beam in beams)
        assert not has_idle or any(beam.awaits_results() for beam in beams), f"{request.id} stands still"


def check_decode_batch(group: WorkerGroup) -> None:
    """A running sequence is in a decode batch or outside, and the rows of a batch agree with its sequences."""
    batches = [group.decode_batch] if group.turns is None else [turn.batch for turn in group.turns._turns]
    inside = [running for batch in batches for running in check_one_batch(group, batch)]
    outside = group.decode_batch.outside
    assert {*map(id, inside), *map(id, outside)} == {*map(id, group.running)}
    assert len(inside) + len(outside) == len(group.running)
    assert [s.key for s in outside] == sorted(s.key for s in outside)
    if group.turns is not None:
        check_turns(group, group.turns)


def check_turns(group: WorkerGroup, turns: PipelineTurns) -> None:
    """A sequence has one turn at most, and a plan in flight has one."""
    assert turns._turn_of.keys() <= set(group.running)
    for turn in turns._turns:
        assert turn.members.keys() == {running for running, of in turns._turn_of.items() if of is turn}
        assert turn.load == sum(turn.members.values())
    assert sorted(number for turn in turns._turns for number in turn.plans) == [
        record.number for record in group.in_flight
    ]


def check_one_batch(group: WorkerGroup, decode_batch: DecodeBatch) -> list[RunningSequence]:
    rows = [outbox_rows.snapshot() for outbox_rows in decode_batch._rows_by_outbox.values()]
    inside = [running for one in rows for running in one.sequences]
    assert len(inside) == len(decode_batch)
    assert not any(map(decode_batch.has, decode_batch.outside))
    for text_outbox, outbox_rows in decode_batch._rows_by_outbox.items():
        now = outbox_rows.snapshot()
        choices = [running.sequence for running in now.sequences]
        assert now.sequences == [
            running
            for running in now.sequences
            if decode_batch.has(running) and running.sequence.request.text_outbox is text_outbox
        ]
        assert outbox_rows._row_of == {running: i for i, running in enumerate(now.sequences)}
        assert [run.slot for run in outbox_rows.runs] == [running.slot for running in now.sequences] == list(now.slots)
        assert all(outputs is choice.outputs for outputs, choice in zip(now.outputs, choices, strict=True))
        assert list(now.streams) == [choice.stream for choice in choices]
        assert now.accounts == Counter(c.request.account for c in choices if c.request.account is not None)
    size, progress = group.kv_cache.blocks.block_size, decode_batch._progress.num_scheduled_tokens
    assert decode_batch._due_step_of.keys() == set(inside)
    for running, due_step in decode_batch._due_step_of.items():
        last = min(running.table.capacity, running.max_scheduled_tokens - 1)
        assert running.prefill_end <= running.num_scheduled_tokens <= last, (
            "it has blocks for its tokens until it is handled by itself"
        )
        assert progress <= due_step <= progress + last - running.num_scheduled_tokens, (
            "it has no token left before it is handled by itself"
        )
        assert due_step - progress <= size
        assert running in decode_batch._due_steps[due_step]
    return inside


def check_group(core: Scheduler, group: WorkerGroup) -> None:
    assert len(group.running) <= group.max_num_seqs
    assert [s.key for s in group.running] == sorted(s.key for s in group.running)
    assert len(group.in_flight) <= group.depth + 1
    pending = [i for _, ids in group.slots._pending for i in ids]
    assert len(pending) == group.slots.num_pending
    used = [running.slot for running in group.running]
    assert sorted(group.slots.free_ids() + pending + used) == list(range(group.slots.num_ids)), "a slot is lost"
    check_blocks(core, group)
    check_adapters(core, group)
    check_decode_batch(group)
    for running in group.running:
        request = running.sequence.request
        last = request.num_prompt + request.frame.sampling.max_tokens - 1  # the last token is not computed
        assert running.num_scheduled_tokens <= max(running.prefill_end, min(last, group.max_model_len - 1))
        assert (
            running.num_scheduled_tokens
            <= running.table.capacity
            == len(running.table.blocks) * group.kv_cache.blocks.block_size
        )
        assert (
            running.num_scheduled_tokens - (running.sequence.num_tokens - 1) <= group.depth + 1
            or running.num_scheduled_tokens <= running.prefill_end
        )


def check(core: Scheduler, turn: int) -> None:
    """Invariants of the core's state. Checks one group in each turn: what is wrong in a group stays wrong.

    So many groups cost no more than one, and histories are longer for it.
    """
    groups = list(core.groups.values())
    if groups:
        check_group(core, groups[turn % len(groups)])
    waiting = [c for r in core.lifecycle.requests.values() for c in r.active_sequences if c.ticket]
    texts = [c.request.texts.num_texts - 1 for c in waiting if c.request.texts is not None]
    assert len(waiting) + sum(texts) == len(core.waiting)
    check_texts(core)
    partial = core.partial_prefills
    held = {id(choice) for choice in partial.deferred()} if partial is not None else set[int]()
    held |= {id(choice) for waits in core.adapter_waits.deferred.values() for ticket, choice in waits if ticket}
    check_policy(core, [choice for choice in waiting if not choice.is_set_aside])
    check_router(core, [choice for choice in waiting if choice.is_set_aside and id(choice) not in held])
    awaiting_prompt = [r for r in core.lifecycle.requests.values() if r.awaiting_prompt]
    assert sum(len(r.awaiting_prompt) for r in awaiting_prompt) == core.parallel_sampling.num_awaiting_prompt
    check_handovers(core)
    check_searches(core)
    arriving = [c for r in core.lifecycle.requests.values() for c in r.active_sequences if c.phase is Phase.ARRIVING]
    queued = [*waiting, *arriving, *(c for r in awaiting_prompt for c in r.awaiting_prompt)]
    lines = [c for c in queued if c.request.is_batch_line]
    amounts, of_lines = _amount([c for c in queued if not c.request.is_batch_line]), _amount(lines)
    assert amounts == core.waiting.usage.amount
    assert of_lines == core.waiting.batch_usage.amount
    assert all(c.queue_amount == c.amount for c in queued)
    refusable = {c.request for c in queued if not (c.request.accepted or c.request.attempt)}
    refusable -= {c.request for c in lines}
    names = [name for user in core.waiting.usage._users.values() for name in user.unaccepted]
    assert len(names) == len(set(names))
    assert set(names) == {r.id if r.pool is None else r.pool.id for r in refusable}
    assert core.waiting.output_limits.total() == amounts.sequences
    for request in awaiting_prompt:
        assert all(c in request.active_sequences and not c.ticket for c in request.awaiting_prompt)
        assert all(c.phase is Phase.WAITING and not c.awaits_results() for c in request.awaiting_prompt)
        assert any(_computes_prompt(c) for c in request.active_sequences), (
            "sequences wait for a prompt that no sequence computes"
        )
    live = core.streams.text_outboxes.values()
    assert all(r.text_outbox is None or r.text_outbox in live for r in core.lifecycle.requests.values())
    for text_outbox in live:
        bound = sum(len(r.sequences) for r in core.lifecycle.requests.values() if r.text_outbox is text_outbox)
        assert text_outbox.num_streams == bound
