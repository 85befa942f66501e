"""A sequence is computed in one group and continued in another, and what happens when a part of that fails."""

from bisect import bisect_left
from dataclasses import replace

import msgspec
import pytest

from blockyard.services.scheduler.admission.admission import capacity_of
from blockyard.services.scheduler.sequences.requests import Phase
from blockyard.services.scheduler.transfers.handovers import NOT_LANDED
from blockyard.shared.messages import (
    SECOND_TOKEN_S,
    Beam,
    Cancel,
    FinishReason,
    KVAbort,
    KVAudit,
    KVLanded,
    KVReceive,
    KVRole,
    KVSendEnded,
    StepPlan,
    TokenBatch,
)

from ..harness.fake_worker import FakeWorker
from .pair import Pair, first_token

P, D = KVRole.PREFILL, KVRole.DECODE


def test_a_prompt_is_computed_in_one_group_and_continued_in_the_other() -> None:
    it = Pair()
    it.submit("a", 22)
    it.prefill()
    assert it.sequence("a").phase is Phase.ARRIVING
    assert len(it.output("a").ids) == 1, "the first token waits for no transfer"
    stats = it.world.core.stats()
    assert (stats.arriving, stats.waiting, stats.running, stats.transfers_open) == (1, 1, 0, 1)
    (receive,) = it.frames(KVReceive, it.target)
    sends = it.sends(it.source)
    assert [len(send.blocks) for send in sends] == [2, 2, 1], "chunk by chunk"
    assert [send.is_last for send in sends] == [False, False, True]
    assert [block for send in sends for block in send.target_blocks] == receive.blocks
    assert receive.source_endpoint == b"%d" % it.source.incarnation
    it.work(it.target)
    it.world.move(it.source.incarnation)
    it.notify()
    assert it.sequence("a").phase is Phase.RUNNING
    it.finish()
    (start,) = it.starts(it.target)
    assert (start.num_computed, start.num_prompt_tokens, len(start.token_ids) // 4) == (20, 22, 23)
    assert len(it.output("a").ids) == 6
    assert it.output("a").num_cached_tokens == 0
    assert it.world.core.stats().transfers_landed_total == 1


def test_the_time_to_the_second_token_is_counted_once_a_handover() -> None:
    it = Pair()
    it.submit("a", 22)
    it.submit("short", 2)  # is not handed over
    it.prefill()
    assert sum(it.world.core.stats().second_token_counts) == 0
    it.world.now += 0.03
    it.finish()
    stats = it.world.core.stats()
    assert sum(stats.second_token_counts) == 1
    assert sum(stats.second_token_counts[: bisect_left(SECOND_TOKEN_S, 0.03)]) == 0
    assert stats.second_token_us_total >= 30_000


def test_the_receiver_hears_of_a_transfer_before_the_sender() -> None:
    it = Pair()
    it.submit("a", 22)
    it.finish()
    order = [type(o.frame) for o in it.world.sent if isinstance(o.frame, KVReceive) or getattr(o.frame, "sends", [])]
    assert order[0] is KVReceive


def test_both_workers_get_the_same_ticket_and_each_transfer_another() -> None:
    it = Pair()
    it.submit("a", 22)
    it.submit("b", 17)
    it.finish()
    received = {f.transfer: f.ticket for f in it.frames(KVReceive, it.target) if isinstance(f, KVReceive)}
    assert {send.transfer: send.ticket for send in it.sends(it.source)} == received
    assert all({send.ticket == received[send.transfer] for send in it.sends(it.source)})
    assert len({*received.values()}) == 2
    assert {len(ticket) for ticket in received.values()} == {16}


@pytest.mark.parametrize(
    "more",
    [
        {"prefix_caching": False},
        {"num_host_blocks": 8},
        {"window": 9},
        {"depth": 0},
        {"policy": "fair"},
        {"block_size": 1},
    ],
)
def test_it_finds_its_blocks_with_any_cache(more: dict[str, object]) -> None:
    it = Pair(**more)
    it.submit("a", 22)
    it.submit("b", 17, num_prompt_logprobs=1)
    it.finish()
    size = it.world.shape.block_size
    assert {start.num_computed for start in it.starts(it.target)} == {22 // size * size, 17 // size * size}
    assert it.world.core.stats().transfers_landed_total == 2


def test_a_window_model_sends_the_blocks_of_the_window() -> None:
    it = Pair(window=9)
    it.submit("a", 22)
    it.finish()
    (receive,) = it.frames(KVReceive, it.target)
    assert len(receive.blocks) == 2


def test_only_what_the_target_lacks_is_sent() -> None:
    it = Pair()
    it.submit("a", 22)
    it.finish()
    prompt = [(i * 7 + 22) % 50 for i in range(22)] + list(range(12))
    it.submit("b", 34, prompt=prompt)
    it.finish()
    first, second = it.frames(KVReceive, it.target)
    assert (len(first.blocks), len(second.blocks)) == (5, 3)


def test_short_prompts_stay_where_they_are() -> None:
    it = Pair(decode_prefill_tokens=8)
    it.submit("short", 8)
    it.submit("long", 9)
    it.finish()
    assert [start.num_prompt_tokens for start in it.starts(it.source)] == [9]
    assert sorted(start.num_prompt_tokens for start in it.starts(it.target)) == [8, 9]


@pytest.mark.parametrize("roles", [(P, P), (D, D), (P,), (D,)])
def test_without_a_group_of_a_role_the_others_serve(roles: tuple[KVRole, ...]) -> None:
    it = Pair(*(roles if len(roles) > 1 else roles * 2))
    if len(roles) == 1:
        it.world.kill(it.target.incarnation)
    it.submit("a", 22)
    it.finish()
    assert not it.sends(it.source)


def test_groups_of_different_layouts_exchange_nothing() -> None:
    it = Pair(P, P)
    it.world.kill(it.target.incarnation)
    it.world.add_worker(D, "another layout")
    it.world.settle()
    it.submit("a", 22)
    it.finish()
    assert not it.sends(it.source)
    assert len(it.starts(it.source)) == 1


@pytest.mark.parametrize("more", [{}, {"num_prompt_logprobs": 1}, {"beam": Beam(3), "temperature": 0.0}])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_all_sequences_of_a_request_go_to_one_group_over_one_transfer(
    more: dict[str, object], prefix_caching: bool
) -> None:
    it = Pair(P, D, D, prefix_caching=prefix_caching)
    it.submit("a", 22, **({"n": 3} | more))
    it.finish()
    assert len({send.transfer for send in it.sends(it.source)}) == 1
    assert [start.num_prompt_tokens for start in it.starts(it.source)] == [22]
    (group,) = [worker for worker in it.workers[1:] if it.starts(worker)]
    starts = it.starts(group)
    assert [start.num_computed for start in starts[:3]] == [20, *[21 + ("beam" in more)] * 2]
    assert it.world.core.stats().transfers_landed_total == 1


@pytest.mark.parametrize("more", [{}, {"num_prompt_logprobs": 1}])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_sequences_of_a_request_wait_for_their_group_if_it_is_full(
    more: dict[str, object], prefix_caching: bool
) -> None:
    it = Pair(P, D, D, prefix_caching=prefix_caching, max_num_seqs=2)
    it.submit("a", 22, n=5, max_tokens=20, **more)
    it.prefill()
    for i in range(4):  # other sequences take slots before the first sequence has arrived
        it.submit(f"{i}", 4, prompt=[3 + i] * 4, max_tokens=30)
    it.finish()
    starts = [[start.num_computed for start in it.starts(w) if start.num_prompt_tokens == 22] for w in it.workers]
    assert starts[0] == [0], "the prompt is computed and sent once"
    (decoded,) = filter(None, starts[1:])
    assert len(decoded) == 5 and min(decoded) == 20
    assert it.world.core.stats().transfers_landed_total == 1


def test_if_the_first_sequence_ends_with_its_first_token_another_one_takes_its_blocks() -> None:
    it = Pair(prefix_caching=False)
    it.submit("a", 22, n=3, num_prompt_logprobs=1, stop_token_ids=[first_token("a", 22)])
    it.finish()
    assert [len(it.output("a", i).ids) for i in range(3)] == [1, 6, 6]
    assert len(it.starts(it.source)) == len({send.transfer for send in it.sends(it.source)}) == 1
    assert [start.num_computed for start in it.starts(it.target)] == [20, 21]
    assert [len(it.output("a", i).prompt_logprobs) for i in range(3)] == [21, 0, 0]


def test_with_the_policy_fail_the_others_fail_if_the_first_sequence_has_ended() -> None:
    it = Pair(load_failure_policy="fail")
    it.submit("a", 22, n=3, stop_token_ids=[first_token("a", 22)])
    while not it.plans(it.source)[-1].sends[-1:] or not it.plans(it.source)[-1].sends[-1].is_last:
        it.world.work(it.source)
    it.work(it.target)
    it.world.transfers[it.target.incarnation].end_receive(it.sends(it.source)[0].transfer)
    it.world.transfers[it.source.incarnation].end_send(it.sends(it.source)[0].transfer, False)
    it.notify()
    it.finish()
    assert [it.output("a", i).finish for i in range(3)] == [FinishReason.STOP, *[FinishReason.FAILED] * 2]


def test_if_the_first_sequence_ends_while_its_blocks_arrive_another_one_takes_them() -> None:
    it = Pair()
    it.detokenizer.stops = lambda step: step.choice == 0
    it.submit("a", 22, n=2)
    it.prefill()
    assert [one.index for one in it.world.core._lifecycle.requests["a"].sequences.values()] == [1]
    assert it.sequence("a", 1).phase is Phase.ARRIVING
    it.finish()
    assert [start.num_computed for start in it.starts(it.target)] == [20]
    assert it.world.core.stats().transfers_aborted_total == 0


def test_the_target_of_several_sequences_dies_while_blocks_arrive() -> None:
    it = Pair(P, D, D)
    it.submit("a", 22, n=3)
    it.prefill()
    it.world.kill(next(w for w in it.workers[1:] if it.frames(KVReceive, w)).incarnation)
    it.finish()
    assert [start.num_computed for start in it.starts(it.source)] == [0, 20]
    assert it.world.core.stats().transfers_landed_total == 1


def test_a_sequence_that_lacks_a_block_of_the_targets_window_is_not_handed_over() -> None:
    """It starts at token 22 behind its sibling, with tokens 20 to 22, and the target would go on at token 20."""
    it = Pair(P, D, D, window=2, prefix_caching=False, max_num_batched_tokens=23)
    it.submit("a", 22, n=2)
    it.prefill()
    target = next(w for w in it.workers[1:] if it.frames(KVReceive, w))
    first, second = it.sequence("a"), it.sequence("a", 1)
    for _ in range(30):
        if not second.outputs:
            it.world.work(target)
            it.world.move(it.source.incarnation)
            it.notify()
    assert second.num_tokens == 23 < first.num_tokens
    it.world.kill(target.incarnation)  # both are to be computed again, and decoded by the other group
    for _ in range(8):
        it.world.work(it.source)
    assert first.phase is Phase.ARRIVING
    assert second.phase is Phase.RUNNING and second.handover is None
    (start,) = [start for start in it.starts(it.source) if start.num_computed]
    assert start.num_computed == 22
    it.finish()


def test_a_request_for_one_token_needs_no_transfer() -> None:
    it = Pair()
    it.submit("a", 22, max_tokens=1)
    it.finish()
    assert not it.sends(it.source)
    assert it.output("a").finish is FinishReason.LENGTH


@pytest.mark.parametrize("n", [1, 3])
def test_what_was_handed_over_is_no_hit_of_the_prefix_cache(n: int) -> None:
    it = Pair()
    it.submit("a", 22, n=n)
    it.finish()
    stats = it.world.core.stats()
    assert (stats.prefix_queries_total, stats.prefix_hits_total) == (22, 0)
    assert [it.output("a", i).num_cached_tokens for i in range(n)] == [0] * n
    it.submit("b", 26, prompt=[(i * 7 + 22) % 50 for i in range(22)] + [1, 2, 3, 4])
    it.finish()
    stats = it.world.core.stats()
    assert (stats.prefix_queries_total, stats.prefix_hits_total) == (22 + 26, 20), "found by the source"
    assert it.output("b").num_cached_tokens == 20


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("dies", [None, 0, 1])
def test_log_probabilities_of_the_prompt_are_delivered_once(n: int, dies: int | None) -> None:
    it = Pair(P, D, P, D)
    it.submit("a", 22, n=n, num_prompt_logprobs=1)
    for worker in it.workers:
        it.work(worker)
    if dies is not None:
        it.world.kill(next(w for w in it.workers[dies::2] if it.frames((StepPlan, KVReceive)[dies], w)).incarnation)
    it.finish()
    steps = [step for o in it.world.sent if isinstance(o.frame, TokenBatch) for step in o.frame.steps]
    scored = [step.first_prompt + i for step in steps for i in range(len(step.prompt_logprobs))]
    assert scored == list(range(1, 22))


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_a_sequence_that_is_preempted_in_the_decode_group_ends_with_its_tokens(prefix_caching: bool) -> None:
    it = Pair(num_blocks=16, prefix_caching=prefix_caching)
    for i in range(3):
        it.submit(f"{i}", 12, max_tokens=30, prompt=[i, *range(11)])
    it.finish()
    assert it.world.core.stats().preemptions_total
    assert [len(it.output(f"{i}").ids) for i in range(3)] == [30] * 3


# --- what dies


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
    ((number, transfer),) = it.world.core._lifecycle.handovers.ledger.transfers.items()
    blocks, source, target = it.world.core._groups.attached, it.source.incarnation, it.target.incarnation
    assert it.world.core.stats().blocks_quarantined == 10
    it.world.tell(target, KVLanded(target, number, [], [], True))
    assert blocks[target].kv_cache.blocks.num_used == 5, "the sender may still write"
    it.world.tell(source, KVSendEnded(source, number, False))
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


def test_a_lost_notice_is_asked_for_when_the_lease_is_over() -> None:
    it = Pair()
    it.submit("a", 22)
    it.prefill()
    it.work(it.target)
    it.world.move(it.source.incarnation)
    for transfers in it.world.transfers.values():
        transfers.notices.clear()
    it.world.now += 4.0
    it.world.turn()
    assert not it.frames(KVAbort, it.target)
    it.world.now += 2.0
    it.world.turn()
    assert it.frames(KVAbort, it.target) and it.frames(KVAbort, it.source)
    it.finish()


def test_the_audit_finds_lost_notices_before_the_lease_is_over() -> None:
    it = Pair(kv_lease_s=1000.0)
    it.submit("a", 22)
    it.prefill()
    it.work(it.target)
    it.world.move(it.source.incarnation)
    for transfers in it.world.transfers.values():
        transfers.notices.clear()
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
        (target, KVLanded(target, number, [1], [], True)),
        (source, KVSendEnded(source, number, True)),
        (target, KVLanded(target, 99, [1])),
        (source, KVSendEnded(source, 99, False)),
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


def test_the_longest_request_is_the_one_that_some_pair_of_groups_serves() -> None:
    it = Pair(P, D)
    assert it.world.core.card is not None
    assert it.world.core.card.max_model_len == 64
    core = it.world.core
    small = msgspec.structs.replace(core._groups.attached[it.source.incarnation].geometry, num_blocks=5)
    large = core._groups.attached[it.target.incarnation].geometry
    assert capacity_of([small, large]).max_model_len == 20
    other = msgspec.structs.replace(small, num_blocks=9)
    assert capacity_of([small, other, large]).max_model_len == 36
    alone = msgspec.structs.replace(other, kv_layout="another")
    assert capacity_of([small, alone, large]).max_model_len == 20
    assert capacity_of([alone, large]).max_model_len == 36, "no pair: what every group serves"


def test_the_notes_name_each_role_and_the_one_that_limits_the_length() -> None:
    it = Pair(P, P)
    assert it.world.core.notes[0].startswith("2 worker groups, each with 64 KV blocks of 4 tokens")
    it.world.kill(it.target.incarnation)
    it.world.shape = replace(it.world.shape, num_blocks=5, max_num_seqs=2)
    it.world.add_worker(D)
    it.world.settle()
    decode, of_decode, prefill, of_prefill, limit = it.world.core.notes
    assert decode.startswith("1 decode group, each with 5 KV blocks of 4 tokens: 20 tokens, 1.0 requests")
    assert prefill.startswith("1 prefill group, each with 64 KV blocks of 4 tokens")
    assert of_decode.startswith("decode batch: 2 sequences, 8 tokens a step")
    assert of_prefill.startswith("prefill batch: 4 sequences, 8 tokens a step")
    assert limit == "max_model_len is 20, not 64: that is what the KV blocks of decode groups hold"


def test_many_groups_share_the_prompts_and_the_sequences() -> None:
    """More groups of a role than are compared for one sequence."""
    it = Pair(*[P] * 12, *[D] * 12)
    for i in range(24):
        it.submit(f"{i}", 20 + i, max_tokens=3, prompt=[i * 7 + j for j in range(20 + i)])
    it.finish()
    prefills = [len(it.starts(worker)) for worker in it.workers[:12]]
    decodes = [len(it.starts(worker)) for worker in it.workers[12:]]
    assert (sum(prefills), sum(decodes)) == (24, 24)
    assert max(prefills) <= 4 and max(decodes) <= 4, (prefills, decodes)


def test_prompts_that_begin_alike_go_to_the_same_pair_of_many() -> None:
    it = Pair(*[P] * 12, *[D] * 12)
    for i in range(6):
        it.submit(f"{i}", 24, max_tokens=3, prompt=[*range(20), i, i, i, i])
        it.world.settle()
    assert sum(bool(it.starts(worker)) for worker in it.workers[:12]) == 1
    assert sum(bool(it.starts(worker)) for worker in it.workers[12:]) == 1
    it.finish()
