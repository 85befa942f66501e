"""Handovers that are interrupted between two steps: nothing is sent, counted or computed twice, and none is stuck."""

import math

import pytest

from blockyard.services.scheduler.batch import worker_groups
from blockyard.services.scheduler.sequences.requests import Phase
from blockyard.shared.messages import Cancel, KVAbort, KVAudit, KVLanded, KVOpenTransfers, KVReceive, KVRole

from .pair import Pair, first_token

P, D = KVRole.PREFILL, KVRole.DECODE
NUM_PROMPT = 18  # its blocks are complete after two of three chunks


def compute_all_blocks(it: Pair) -> None:
    """The source has computed all blocks of the prompt, and may send them, but not yet its last chunk."""
    outgoing = it.world.transfers[it.source.incarnation].outgoing
    while not any(one.has_all for one in outgoing.values()):
        it.world.work(it.source)
    assert it.sequence("a").phase is Phase.RUNNING


def land_all_before_the_last_chunk() -> Pair:
    """All blocks have landed in the target, which has said so, while the source computes the rest of the prompt."""
    it = Pair()
    it.submit("a", NUM_PROMPT)
    it.work(it.target)
    compute_all_blocks(it)
    it.world.move(it.source.incarnation)
    while it.world.transfers[it.target.incarnation].notices:
        it.world.notify(it.target.incarnation)
    assert it.sequence("a").phase is Phase.RUNNING
    return it


def test_after_the_sender_has_stopped_no_block_is_sent() -> None:
    it = Pair()
    it.submit("a", 22)
    it.world.work(it.source)
    (send,) = it.sends(it.source)[:1]
    it.world.transfers[it.source.incarnation].end_send(send.transfer, False)
    it.notify()
    num_sent = len(it.sends(it.source))
    it.prefill()
    assert len(it.sends(it.source)) == num_sent and not send.is_last
    it.finish()
    assert it.world.core.stats().transfers_aborted_total == 1


def test_a_transfer_that_has_landed_is_not_aborted_when_its_sequence_ends() -> None:
    it = land_all_before_the_last_chunk()
    it.gateway.journals["a"].cancelled = True
    it.world.tell(it.gateway.incarnation, Cancel("a", 0))
    it.finish()
    stats = it.world.core.stats()
    assert (stats.transfers_landed_total, stats.transfers_aborted_total) == (1, 0)
    assert not it.frames(KVAbort, it.target) and not it.frames(KVAbort, it.source)


def test_a_sequence_whose_blocks_have_landed_goes_on_when_its_prompt_is_computed() -> None:
    it = land_all_before_the_last_chunk()
    it.finish()
    assert [start.num_computed for start in it.starts(it.target)] == [16]


def test_a_sequence_that_still_computes_its_prompt_stays_when_its_lease_is_over() -> None:
    it = Pair()
    it.submit("a", NUM_PROMPT)
    compute_all_blocks(it)
    for _ in range(3):
        it.world.now += it.world.shape.kv_lease_s + 1.0
        it.world.turn()
    assert it.sequence("a").phase is Phase.RUNNING
    it.finish()
    assert [start.num_computed for start in it.starts(it.source)] == [0], "the prompt is computed once"


def test_when_a_lease_is_over_the_answers_are_waited_for() -> None:
    it = Pair()
    it.submit("a", 22)
    it.prefill()
    it.work(it.target)
    it.world.move(it.source.incarnation)
    it.world.now += it.world.shape.kv_lease_s + 1.0
    it.world.turn()
    assert it.frames(KVAbort, it.target)
    assert it.sequence("a").phase is Phase.ARRIVING
    it.finish()
    assert [start.num_computed for start in it.starts(it.target)] == [20], "all blocks had landed"


@pytest.mark.parametrize("num_prompt_logprobs", [None, 1])
def test_siblings_of_a_sequence_that_ended_with_its_first_token_count_the_prompt_once(
    num_prompt_logprobs: int | None,
) -> None:
    it = Pair(P, D, D)
    stops = [first_token("a", 22)]
    it.submit("a", 22, n=4, stop_token_ids=stops, num_prompt_logprobs=num_prompt_logprobs)
    it.prefill()
    it.world.kill(next(w for w in it.workers[1:] if it.frames(KVReceive, w)).incarnation)
    it.finish()
    assert [it.output("a", i).num_cached_tokens for i in range(4)] == [0] * 4
    assert [len(it.output("a", i).ids) for i in range(4)] == [1, 6, 6, 6]
    expected = [21, 0, 0, 0] if num_prompt_logprobs else [0] * 4
    assert [len(it.output("a", i).prompt_logprobs) for i in range(4)] == expected


def test_the_target_dies_after_another_sequence_has_taken_the_blocks() -> None:
    it = Pair(P, D, D)
    it.detokenizer.stops = lambda step: step.choice == 0
    it.submit("a", 22, n=2)
    it.prefill()
    assert it.sequence("a", 1).phase is Phase.ARRIVING
    it.world.kill(next(w for w in it.workers[1:] if it.frames(KVReceive, w)).incarnation)
    assert it.sequence("a", 1).phase is not Phase.ARRIVING
    it.finish()
    assert len(it.output("a", 1).ids) == 6


@pytest.mark.parametrize("ends", ["the sequence", "the target"])
def test_a_sequence_that_has_arrived_is_not_seated_if_it_or_its_group_ends_before_the_next_step(ends: str) -> None:
    it = Pair(P, D, D)
    it.submit("a", 22)
    it.prefill()
    target = next(w for w in it.workers[1:] if it.frames(KVReceive, w))
    it.work(target)
    it.world.move(it.source.incarnation)
    core, handovers = it.world.core, it.world.core.handovers
    for worker in (target, it.source):
        notices = it.world.transfers[worker.incarnation].notices
        while notices:
            core.on_message(worker.incarnation, notices.popleft(), it.world.now)
    assert [worker for _, worker in handovers.arrived] == [target.incarnation]
    if ends == "the sequence":
        it.gateway.journals["a"].cancelled = True
        core.on_message(it.gateway.incarnation, Cancel("a", 0), it.world.now)
        it.world.turn()
    else:
        it.world.kill(target.incarnation)
    assert not it.starts(target) and not handovers.arrived
    it.finish()
    assert len(it.output("a").ids) == (1 if ends == "the sequence" else 6)


def test_an_audit_misses_no_transfer_whose_plan_is_not_complete() -> None:
    """A sender hears of a transfer when the plan with its blocks is complete."""
    it = Pair(kv_lease_s=1000.0, depth=0)
    it.submit("a", 22)
    it.world.now += 61.0
    it.world.turn()
    audits = [frame for frame in it.frames(KVAudit, it.source) if isinstance(frame, KVAudit)]
    assert it.sends(it.source) and not it.world.transfers[it.source.incarnation].outgoing
    it.world.tell(it.source.incarnation, KVOpenTransfers(audits[-1].number))
    assert it.world.core.stats().transfer_audit_differences_total == 0
    it.finish()
    assert it.world.core.stats().transfers_landed_total == 1


def test_late_notices_of_the_target_seat_nothing_twice() -> None:
    it = land_all_before_the_last_chunk()
    (receive,) = it.frames(KVReceive, it.target)
    assert isinstance(receive, KVReceive)
    it.world.tell(it.target.incarnation, KVLanded(receive.transfer, receive.blocks, [], True))
    it.finish()
    stats = it.world.core.stats()
    assert (stats.transfer_notices_dropped_total, stats.transfers_landed_total) == (1, 1)
    assert len(it.starts(it.target)) == 1


def test_a_sequence_whose_blocks_land_last_gets_a_plan_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not wait for the check of all groups."""
    monkeypatch.setattr(worker_groups, "CHECK_ALL_S", math.inf)
    it = Pair()
    it.submit("a", NUM_PROMPT)
    it.prefill()
    it.finish()
    assert len(it.starts(it.target)) == 1
