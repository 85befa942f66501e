"""Workers die, links fail, requests are cancelled and notices get lost while prompts are handed over."""

import pytest

from blockyard.services.scheduler.sequences.requests import Phase
from blockyard.services.scheduler.transfers.handovers import NOT_LANDED
from blockyard.shared.messages import (
    Beam,
    Cancel,
    FinishReason,
    KVAbort,
    KVAudit,
    KVLanded,
    KVReceive,
    KVRole,
    KVSendEnded,
)

from ..harness.fake_worker import FakeWorker
from .pair import Pair

P, D = KVRole.PREFILL, KVRole.DECODE


def test_the_source_dies_before_the_first_token() -> None:
    it = Pair(P, D, P)
    it.submit("a", 22)
    victim = next(w for w in it.workers if w.busy() and w is not it.target)
    for _ in range(2):
        it.world.work(victim)
    it.world.kill(victim.incarnation)
    assert it.frames(KVAbort, it.target)
    assert it.world.core.stats().blocks_quarantined == 5
    it.finish()
    assert it.world.core.stats().transfers_landed_total == 1, "the other prefill group computed it"


@pytest.mark.parametrize("num_landed", [0, 2, 5])
def test_the_source_dies_between_first_token_and_landing(num_landed: int) -> None:
    it = Pair()
    it.submit("a", 22)
    it.prefill()
    it.work(it.target)
    it.world.move(it.source.incarnation, num_landed)
    it.world.kill(it.source.incarnation)
    it.finish()
    (start,) = it.starts(it.target)
    assert start.num_computed == 4 * num_landed, "the decode side computes what did not land"


def test_the_target_dies_while_blocks_arrive() -> None:
    it = Pair(P, D, D)
    it.submit("a", 22)
    it.prefill()
    target = next(w for w in it.workers[1:] if it.frames(KVReceive, w))
    other = next(w for w in it.workers[1:] if w is not target)
    it.work(target)
    it.world.move(it.source.incarnation, 2)
    it.world.kill(target.incarnation)
    it.finish()
    assert len(it.starts(it.source)) == 2
    assert it.starts(it.source)[1].num_computed == 20, "its blocks are still there, and are sent again"
    assert [start.num_computed for start in it.starts(other)] == [20]


def test_the_target_dies_before_the_first_token() -> None:
    it = Pair(P, D, D)
    it.submit("a", 22)
    target = next(w for w in it.workers[1:] if it.frames(KVReceive, w))
    it.world.work(it.source)
    it.world.kill(target.incarnation)
    it.finish()
    assert it.world.core.stats().transfers_landed_total == 1


def test_the_last_decode_group_dies_and_the_prefill_group_decodes() -> None:
    it = Pair()
    it.submit("a", 22)
    it.prefill()
    it.world.kill(it.target.incarnation)
    it.finish()
    assert len(it.output("a").ids) == 6


@pytest.mark.parametrize("source_first", [True, False])
def test_a_broken_link_between_the_workers_aborts_on_both(source_first: bool) -> None:
    it = Pair()
    it.submit("a", 22)
    it.prefill()
    it.work(it.target)
    it.world.move(it.source.incarnation, 3)
    ((number, _),) = it.world.transfers[it.source.incarnation].outgoing.items()
    notices = [
        lambda: it.world.transfers[it.source.incarnation].end_send(number, False),
        lambda: it.world.transfers[it.target.incarnation].cut(number),
    ]
    for notice in notices[:: 1 if source_first else -1]:
        notice()
        it.notify()
    assert [ask.sender_stopped for ask in it.frames(KVAbort, it.target)][-1]
    before = it.world.now
    it.finish()
    assert it.world.now < before + it.world.shape.kv_lease_s, "no lease had to end"
    assert [start.num_computed for start in it.starts(it.target)] == [12]
    assert it.world.core.stats().transfers_aborted_total == 1


def test_a_pair_whose_link_fails_is_avoided_for_a_while() -> None:
    it = Pair(P, D, D)
    it.submit("a", 22)
    it.prefill()
    target = next(w for w in it.workers[1:] if it.frames(KVReceive, w))
    other = next(w for w in it.workers[1:] if w is not target)
    it.world.transfers[it.source.incarnation].end_send(
        next(iter(it.world.transfers[it.source.incarnation].outgoing)), False
    )
    it.finish()
    for name in "bcd":
        it.submit(name, 17, prompt=[ord(name), *range(16)])
        it.finish()
    assert (len(it.frames(KVReceive, target)), len(it.frames(KVReceive, other))) == (1, 3)
    it.world.now += 1.0
    for name in "efgh":
        it.submit(name, 17, prompt=[ord(name), *range(16)])
    it.work(it.source)
    assert len(it.frames(KVReceive, target)) == 2, "one is tried"
    it.finish()
    for name in "ijkl":
        it.submit(name, 17, prompt=[ord(name), *range(16)])
    it.finish()
    assert len(it.frames(KVReceive, target)) == 4


def test_if_all_links_fail_the_prompts_are_not_sent() -> None:
    it = Pair()
    it.submit("a", 22)
    it.prefill()
    it.work(it.target)
    it.world.move(it.source.incarnation, 3, fails=True)
    it.finish()
    it.submit("b", 17)
    it.finish()
    assert len(it.frames(KVReceive, it.target)) == 1
    assert len(it.output("b").ids) == 6


def fail_transfer(it: Pair) -> FakeWorker:
    """The first transfer fails. Returns its target, to which the source sends nothing for a while."""
    it.submit("fails", 22)
    it.prefill()
    source = it.world.transfers[it.source.incarnation]
    (number, transfer) = next(iter(source.outgoing.items()))
    target = it.world.workers[transfer.target]
    source.end_send(number, False)
    it.finish()
    return target


def prompts_started(it: Pair, worker: FakeWorker) -> list[int]:
    return [start.num_prompt_tokens for start in it.starts(worker) if not start.num_computed]


@pytest.mark.parametrize("is_busy", [False, True])
def test_while_transfers_to_a_decode_group_fail_it_computes_prompts_if_pairs_cost_more(is_busy: bool) -> None:
    it = Pair(P, D, D, max_num_batched_tokens=64)
    target = fail_transfer(it)
    if is_busy:  # the source, with a long prompt that goes to the other decode group
        it.submit("long", 40, prompt=[1, *range(39)])
    it.submit("a", 30, prompt=[2, *range(29)])
    it.finish()
    assert (30 in prompts_started(it, target)) == is_busy
    assert (30 in prompts_started(it, it.source)) != is_busy


@pytest.mark.parametrize("num_running", [0, 3])
def test_a_decode_group_that_decodes_much_computes_no_prompt_while_transfers_to_it_fail(num_running: int) -> None:
    it = Pair(max_num_batched_tokens=64)
    assert fail_transfer(it) is it.target
    for i in range(num_running):  # short prompts stay in the decode group
        it.submit(f"{i}", 4, prompt=[3 + i] * 4, max_tokens=40)
    while len(it.target.tables) < num_running:
        it.world.work(it.target)
    it.work(it.world.add_worker(D))
    it.submit("long", 40, prompt=[1, *range(39)])  # the source is busy
    it.submit("a", 30, prompt=[2, *range(29)])
    it.finish()
    assert (30 in prompts_started(it, it.target)) == (not num_running)
    assert (30 in prompts_started(it, it.source)) == (num_running > 0)


@pytest.mark.parametrize("num_running", [0, 2])
def test_if_all_links_fail_the_cheapest_group_of_any_role_computes_and_decodes(num_running: int) -> None:
    it = Pair(max_num_batched_tokens=64)
    fail_transfer(it)
    for i in range(num_running):
        it.submit(f"{i}", 30, prompt=[3 + i] * 30, max_tokens=12)
    it.submit("a", 31, prompt=[2, *range(30)])
    it.finish()
    started = [[num for num in prompts_started(it, worker) if num >= 30] for worker in it.workers]
    assert started == ([[30, 31], [30]] if num_running else [[31], []])


@pytest.mark.parametrize("when", ["computing", "arriving"])
def test_a_cancel_reaches_both(when: str) -> None:
    it = Pair()
    prompt = [*range(9, 31)]
    it.submit("cached", 10, prompt=prompt[:10])  # the target has its blocks, and holds them for the next request
    it.finish()
    it.submit("a", 22, prompt=prompt)
    if when == "computing":
        it.world.work(it.source)
        it.world.work(it.source)
    else:
        it.prefill()
    it.gateway.journals["a"].cancelled = True
    it.world.tell(it.gateway.incarnation, Cancel("a", 0))
    assert it.world.core.stats().blocks_quarantined > 0
    assert it.frames(KVAbort, it.source) and it.frames(KVAbort, it.target)
    it.finish()


def test_blocks_are_quarantined_until_both_workers_have_answered() -> None:
    it = Pair()
    it.submit("a", 22)
    it.prefill()
    it.gateway.journals["a"].cancelled = True
    it.world.tell(it.gateway.incarnation, Cancel("a", 0))
    ((number, transfer),) = it.world.core.ledger.transfers.items()
    blocks, source, target = it.world.core.groups, it.source.incarnation, it.target.incarnation
    assert it.world.core.stats().blocks_quarantined == 10
    it.world.tell(target, KVLanded(number, [], [], True))
    assert blocks[target].kv_cache.blocks.num_used == 5, "the sender may still write"
    it.world.tell(source, KVSendEnded(number, False))
    assert (blocks[source].kv_cache.blocks.num_used, blocks[target].kv_cache.blocks.num_used) == (0, 0)
    assert not transfer.source.blocks


def test_a_failed_block_is_computed_again_and_counted() -> None:
    it = Pair()
    it.submit("a", 22)
    it.prefill()
    it.work(it.target)
    it.world.move(it.source.incarnation, 3, fails=True)
    it.finish()
    assert [start.num_computed for start in it.starts(it.target)] == [8]
    assert it.world.core.stats().transfer_blocks_failed_total == 1


def test_a_source_block_that_fails_twice_is_found_no_more() -> None:
    it = Pair(P, D, D, D)
    for i in range(3):
        it.submit(f"{i}", 22, prompt=[(j * 7 + 22) % 50 for j in range(22)])
        it.prefill()
        target = next(w for w in it.workers[1:] if w.inbox)
        it.work(target)
        it.world.move(it.source.incarnation, 3, fails=i < 2)
        it.finish()
        it.world.now += 4.0
        it.world.kill(target.incarnation)
    assert [start.num_computed for start in it.starts(it.source)] == [0, 20, 8], "the third block is computed again"
    assert it.world.core.stats().transfer_blocks_failed_total == 2


@pytest.mark.parametrize("more", [{}, {"n": 3}, {"n": 2, "beam": Beam(3), "temperature": 0.0}])
@pytest.mark.parametrize("lost", ["a block", "the source", "the answers"])
def test_with_the_policy_fail_a_request_whose_blocks_do_not_land_ends_with_an_error(
    lost: str, more: dict[str, object]
) -> None:
    it = Pair(load_failure_policy="fail")
    it.submit("a", 22, **more)
    it.prefill()
    it.work(it.target)
    if lost == "a block":
        it.world.move(it.source.incarnation, 3, fails=True)
    elif lost == "the source":
        it.world.kill(it.source.incarnation)
    else:
        for _ in range(2):
            it.world.now += 6.0
            it.world.turn()
    it.finish()
    outputs = it.gateway.journals["a"].outputs.values()
    assert {(out.finish, out.detail) for out in outputs} == {(FinishReason.FAILED, NOT_LANDED)}
    assert not it.starts(it.target), "nothing is computed again"
    it.submit("b", 22)
    it.finish()
    assert len(it.output("b").ids) == 6


def test_with_the_policy_fail_a_sequence_whose_decode_worker_dies_goes_on_in_another_group() -> None:
    it = Pair(P, D, D, load_failure_policy="fail")
    it.submit("a", 22)
    it.prefill()
    it.world.kill(next(w for w in it.workers[1:] if it.frames(KVReceive, w)).incarnation)
    it.finish()
    assert len(it.output("a").ids) == 6


def without_notices(**settings: float) -> Pair:
    """All blocks of a prompt have landed, and what both workers say of it is lost."""
    it = Pair(**settings)
    it.submit("a", 22)
    it.prefill()
    it.work(it.target)
    it.world.move(it.source.incarnation)
    for transfers in it.world.transfers.values():
        transfers.notices.clear()
    return it


def test_a_lost_notice_is_asked_for_when_the_lease_is_over() -> None:
    it = without_notices()
    it.world.now += 4.0
    it.world.turn()
    assert not it.frames(KVAbort, it.target)
    it.world.now += 2.0
    it.world.turn()
    assert it.frames(KVAbort, it.target) and it.frames(KVAbort, it.source)
    it.finish()


def test_the_audit_finds_lost_notices_before_the_lease_is_over() -> None:
    it = without_notices(kv_lease_s=1000.0)
    it.world.now += 59.0
    it.world.turn()
    assert not it.frames(KVAudit, it.target)
    it.world.now += 2.0
    it.world.turn()
    for worker in it.workers:
        it.work(worker)
    it.notify()
    assert it.sequence("a").phase is Phase.RUNNING
    stats = it.world.core.stats()
    assert (stats.transfer_audit_differences_total, stats.transfers_open) == (2, 0)
    it.finish()


def test_the_audit_finds_no_difference_in_a_sound_world() -> None:
    it = Pair(P, P, D, D, kv_lease_s=1000.0)
    for i in range(12):
        it.submit(f"{i}", 20 + i, prompt=[i, *range(19 + i)])
        for j, worker in enumerate(it.workers):
            if (i + j) % 3:
                it.world.work(worker)
                it.world.move(worker.incarnation, 2)
        it.world.now += 30.0
        it.world.turn()
    it.finish()
    assert it.frames(KVAudit, it.source) and it.frames(KVAudit, it.workers[2])
    assert it.world.core.stats().transfer_audit_differences_total == 0


def test_a_sequence_does_not_wait_for_a_worker_that_never_answers() -> None:
    it = Pair()
    it.submit("a", 22)
    it.prefill()
    for _ in range(2):
        it.world.now += 6.0
        it.world.turn()
    assert it.sequence("a").phase is not Phase.ARRIVING
    assert it.world.core.stats().blocks_quarantined == 10
    it.finish()


def test_unknown_doubled_and_late_notices_are_dropped_and_counted() -> None:
    it = Pair()
    it.submit("a", 22)
    it.finish()
    source, target = it.source.incarnation, it.target.incarnation
    ((number,)) = {send.transfer for send in it.sends(it.source)}
    for peer, frame in (
        (target, KVLanded(number, [1], [], True)),
        (source, KVSendEnded(number, True)),
        (target, KVLanded(99, [1])),
        (source, KVSendEnded(99, False)),
    ):
        it.world.tell(peer, frame)
    assert it.world.core.stats().transfer_notices_dropped_total == 4
    it.world.check_idle()


def test_a_new_scheduler_keeps_blocks_of_open_transfers_out_of_use() -> None:
    it = Pair()
    it.submit("a", 22)
    it.prefill()
    it.work(it.target)
    it.world.blink(it.target.incarnation)
    it.world.blink(it.source.incarnation)
    for worker in it.workers:
        it.world.work(worker)
    assert it.world.core.stats().blocks_quarantined == 10
    it.finish()
