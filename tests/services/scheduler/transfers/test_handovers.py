"""A sequence is computed in one group and continued in another."""

from bisect import bisect_left
from dataclasses import replace

import msgspec
import pytest

from blockyard.services.scheduler.admission.model_limits import capacity_of
from blockyard.services.scheduler.sequences.requests import Phase
from blockyard.shared.messages import (
    SECOND_TOKEN_S,
    Beam,
    FinishReason,
    KVReceive,
    KVRole,
    StepPlan,
    TokenBatch,
)

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
    assert [one.index for one in it.world.core.lifecycle.requests["a"].sequences.values()] == [1]
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


def test_the_longest_request_is_the_one_that_some_pair_of_groups_serves() -> None:
    it = Pair(P, D)
    assert it.world.core.card is not None
    assert it.world.core.card.max_model_len == 64
    core = it.world.core
    small = msgspec.structs.replace(core.groups[it.source.incarnation].geometry, num_blocks=5)
    large = core.groups[it.target.incarnation].geometry
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
