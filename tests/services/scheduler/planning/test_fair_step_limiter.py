"""Under the fair policy, prompts of a tenant above its share keep steps short for the others."""

from itertools import pairwise

import pytest

from blockyard.services.scheduler.plan_pacer import StepLoad
from blockyard.shared.messages import StepPlan

from ..conftest import Ring

TOKEN_S = 0.001
TOKENS = 64  # token budget of a step


def tokens_of(it: Ring, begin: int) -> list[dict[int, int]]:
    """Tokens by slot, for each plan sent from index `begin` on."""
    plans = [o.frame for o in it.world.sent[begin:] if isinstance(o.frame, StepPlan)]
    return [{run.slot: run.max_tokens for run in plan.runs} for plan in plans]


def make(ring: type[Ring], policy: str, **shape: object) -> Ring:
    """A step takes 2 ms plus 1 ms for each decode and each prompt token."""
    shape = {"max_num_seqs": 8, "num_blocks": 200, "max_model_len": 200, "max_num_batched_tokens": TOKENS} | shape
    it = ring(policy=policy, depth=0, **shape)
    (group,) = it.world.core.groups.values()
    for load in (StepLoad(1, 0), StepLoad(8, 0), StepLoad(4, 0), StepLoad(2, TOKENS), StepLoad(3, 20)) * 40:
        group.pacer.times.record(load, 0.002 + 0.001 * load.decodes + TOKEN_S * load.tokens)
    group.pacer.times.record = lambda load, step_s: None
    return it


def largest(it: Ring, begin: int) -> int:
    return max(sum(n for n in tokens.values() if n > 1) for tokens in tokens_of(it, begin))


def flood_after_the_first(it: Ring) -> int:
    """Sends prompts of one tenant after its first request. Returns the largest number of prompt tokens in a step."""
    it.submit("first", 8, tenant="heavy", max_tokens=8)
    begin = len(it.world.sent)
    for i in range(8):
        it.submit(f"heavy {i}", 30, prompt=[i] * 30, tenant="heavy", max_tokens=30)
    it.steps(10)
    return largest(it, begin)


@pytest.mark.parametrize(("policy", "most"), [("fair", 10), ("fcfs", TOKENS), ("priority", TOKENS)])
def test_prompts_above_the_share_keep_steps_short(ring: type[Ring], policy: str, most: int) -> None:
    it = make(ring, policy)
    it.submit("light", 8, tenant="light", max_tokens=1)
    it.finish()
    for i in range(8):
        it.submit(f"heavy {i}", 30, prompt=[i] * 30, tenant="heavy", max_tokens=30)
    begin = len(it.world.sent)
    it.steps(20)
    assert most - 3 <= largest(it, begin) <= most
    it.finish()


def test_a_single_tenant_takes_the_whole_budget(ring: type[Ring]) -> None:
    it = make(ring, "fair")
    assert flood_after_the_first(it) > TOKENS - 8
    it.finish()


def test_a_tenant_counts_as_recent_for_a_minute(ring: type[Ring]) -> None:
    it = make(ring, "fair")
    it.submit("light", 8, tenant="light", max_tokens=1)
    it.finish()
    it.world.now += 61.0
    assert flood_after_the_first(it) > TOKENS - 8
    it.finish()


def test_a_tenant_below_its_share_has_the_whole_budget(ring: type[Ring]) -> None:
    it = make(ring, "fair")
    for i in range(4):
        it.submit(f"heavy {i}", 8, prompt=[i] * 8, tenant="heavy", max_tokens=60)
    it.steps(10)
    begin = len(it.world.sent)
    it.submit("light", 60, tenant="light", max_tokens=1)
    it.steps(2)
    assert largest(it, begin) == 60
    it.finish()


@pytest.mark.parametrize("whole_prompts", [False, True])
def test_without_chunks_a_prompt_is_not_limited(ring: type[Ring], whole_prompts: bool) -> None:
    it = make(ring, "fair", whole_prompts=whole_prompts)
    it.submit("light", 8, tenant="light", max_tokens=1)
    for i in range(12):
        it.submit(f"heavy {i}", 60, prompt=[i] * 60, tenant="heavy", max_tokens=3)
    begin = len(it.world.sent)
    it.steps(6)
    assert (largest(it, begin) >= 60) == whole_prompts
    it.finish()


def test_a_prompt_that_lengthens_every_step_too_much_gets_a_token_of_each(ring: type[Ring]) -> None:
    """It once waited for ever, where even the smallest share of the budget is no whole token."""
    it = make(ring, "fcfs", max_num_batched_tokens=8)
    it.submit("online", 5, max_tokens=1)
    it.submit("line", 5, batch_line=True, max_tokens=3)
    begin = len(it.world.sent)
    it.finish()
    assert max(tokens_of(it, begin)[-1].values()) == 1
    assert not it.journal("line").open()


def crowd(ring: type[Ring], policy: str, num: int) -> tuple[Ring, int]:
    """`num` requests of the heavy tenant decode when the light tenant's request arrives."""
    it = make(ring, policy)
    for i in range(num):
        it.submit(f"heavy {i}", 8, prompt=[i] * 8, tenant="heavy", priority=5, max_tokens=60)
    it.steps(20)
    begin = len(it.world.sent)
    it.submit("light", 20, prompt=[99] * 20, tenant="light", max_tokens=8)
    it.steps(3)
    return it, begin


@pytest.mark.parametrize("policy", ["fair", "priority"])
def test_a_sequence_of_a_lower_class_has_the_next_step_alone(ring: type[Ring], policy: str) -> None:
    it, begin = crowd(ring, policy, 6)
    alone, together = tokens_of(it, begin)[:2]
    assert list(alone.values()) == [20]
    assert len(together) == 7
    it.finish()


def test_fcfs_has_one_class(ring: type[Ring]) -> None:
    it, begin = crowd(ring, "fcfs", 6)
    assert len(tokens_of(it, begin)[0]) == 7
    it.finish()


def test_decodes_stay_in_a_step_that_they_hardly_lengthen(ring: type[Ring]) -> None:
    it, begin = crowd(ring, "fair", 1)
    assert len(tokens_of(it, begin)[0]) == 2
    it.finish()


def test_decodes_are_left_out_of_one_step_at_most(ring: type[Ring]) -> None:
    it = make(ring, "priority", max_num_seqs=16, max_queue_len=1000)
    for i in range(6):
        it.submit(f"low {i}", 8, prompt=[i] * 8, priority=50, max_tokens=80)
    it.steps(20)
    begin = len(it.world.sent)
    for i in range(30):
        it.submit(f"high {i}", 4, prompt=[i] * 4, priority=-i, max_tokens=1)
        it.steps(1)
    decodes = [sum(n == 1 for n in tokens.values()) for tokens in tokens_of(it, begin)]
    assert 0 in decodes
    assert all(max(pair) >= 6 for pair in pairwise(decodes))
    it.finish()


def test_a_tenant_does_not_preempt_its_own_sequences(ring: type[Ring]) -> None:
    """When sequences end, the remaining ones keep their classes."""
    it = ring(policy="fair", max_num_seqs=4, depth=0, num_blocks=100, max_num_batched_tokens=64)
    for i in range(4):
        it.submit(f"heavy {i}", 4, prompt=[i] * 4, tenant="heavy", max_tokens=4 + 10 * i)
    it.steps(2)
    for i in range(4, 8):
        it.submit(f"heavy {i}", 4, prompt=[i] * 4, tenant="heavy", max_tokens=30)
    it.submit("light", 4, tenant="light", max_tokens=30)
    it.steps(2)
    assert it.world.core.stats().displaced_total == 1, "the light one's"
    it.steps(12)
    assert it.world.core.stats().displaced_total == 1
    it.finish()
