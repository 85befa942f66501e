"""Single scenarios of the scheduler core, with the mock batch as its worker."""

import pytest

from blockyard.shared.messages import (
    Cancel,
    FinishReason,
    StepPlan,
    Stop,
    StreamRef,
    TokenBatch,
)

from .conftest import Ring
from .harness.world import World

LENGTH, STOP = FinishReason.LENGTH, FinishReason.STOP


def plans(world: World) -> list[StepPlan]:
    return [o.frame for o in world.sent if isinstance(o.frame, StepPlan)]


def batches(world: World) -> list[TokenBatch]:
    return [o.frame for o in world.sent if isinstance(o.frame, TokenBatch)]


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_a_request_runs_to_its_length(ring: type[Ring], depth: int) -> None:
    it = ring(depth=depth)
    it.submit("a", 5, max_tokens=8)
    it.finish()
    assert (len(it.output("a").ids), it.output("a").finish) == (8, LENGTH)
    assert len(plans(it.world)) == 8  # no plan is wasted: the end by max_tokens is known in advance


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_plans_leave_before_the_results_of_earlier_ones_are_in(ring: type[Ring], depth: int) -> None:
    it = ring(depth=depth)
    it.submit("a", 5, max_tokens=20)
    assert len(it.worker.in_flight) == depth + 1
    for plan in plans(it.world)[1:]:
        assert [run.max_tokens for run in plan.runs] == [1]
    it.steps(3)
    assert len(it.worker.in_flight) == depth + 1


@pytest.mark.parametrize("depth", [0, 1])
def test_length_of_the_model_ends_a_choice(ring: type[Ring], depth: int) -> None:
    it = ring(depth=depth, max_model_len=20)
    it.submit("a", 12, max_tokens=100)
    it.finish()
    assert (len(it.output("a").ids), it.output("a").finish) == (8, LENGTH)


def test_a_pool_smaller_than_the_model_length_is_the_limit(ring: type[Ring]) -> None:
    it = ring(max_model_len=64, num_blocks=5, block_size=4)
    card = it.world.core.card
    assert card is not None
    assert card.max_model_len == 20
    assert any("20, not 64" in note for note in it.world.core.notes)
    it.submit("a", 12, max_tokens=100)
    it.finish()
    assert (len(it.output("a").ids), it.output("a").finish) == (8, LENGTH)


def test_scoring_a_prompt_takes_no_token(ring: type[Ring]) -> None:
    it = ring(max_num_batched_tokens=4)
    it.submit("a", 10, max_tokens=0, num_prompt_logprobs=1)
    it.finish()
    out = it.output("a")
    assert (out.ids, out.finish) == ([], LENGTH)
    assert sorted(out.prompt_logprobs) == list(range(1, 10))


@pytest.mark.parametrize("depth", [0, 2])
def test_scoring_a_prompt_that_fills_the_context(ring: type[Ring], depth: int) -> None:
    it = ring(max_model_len=20, num_blocks=5, block_size=4, max_num_batched_tokens=8, depth=depth)
    it.submit("a", 20, max_tokens=0, n=2, num_prompt_logprobs=1)
    it.submit("b", 20, max_tokens=0)
    it.finish()
    assert (it.output("a").ids, it.output("a").finish, it.output("b").finish) == ([], LENGTH, LENGTH)
    assert sorted(it.output("a").prompt_logprobs) == list(range(1, 20))


def test_end_of_sequence_ends_a_choice_and_its_slot_is_given_back(ring: type[Ring]) -> None:
    it = ring(eos_every=3)
    for i in range(12):
        it.submit(f"{i}", 3, max_tokens=50, seed=i)
    it.finish()
    assert {it.output(f"{i}").finish for i in range(12)} == {STOP}


def test_decodes_come_first_and_a_long_prompt_takes_what_is_left(ring: type[Ring]) -> None:
    it = ring(max_num_batched_tokens=8, depth=0)
    it.submit("a", 3, max_tokens=20)
    it.submit("b", 3, max_tokens=20)
    it.steps(2)
    it.submit("long", 20, max_tokens=2)
    it.steps(1)
    assert [run.max_tokens for run in plans(it.world)[-1].runs] == [1, 1, 6]
    it.finish()


def test_without_chunks_a_prompt_waits_for_a_step_that_takes_all_of_it(ring: type[Ring]) -> None:
    it = ring(max_num_batched_tokens=20, depth=0, whole_prompts=True)
    it.submit("a", 12, max_tokens=4)
    it.submit("b", 20, max_tokens=4)
    it.finish()
    chunk_sizes = [run.max_tokens for plan in plans(it.world) for run in plan.runs if run.max_tokens > 1]
    assert chunk_sizes == [12, 20]
    assert not any(20 in [r.max_tokens for r in p.runs] and len(p.runs) > 1 for p in plans(it.world))


def test_no_more_sequences_than_allowed(ring: type[Ring]) -> None:
    it = ring(max_num_seqs=2, max_num_batched_tokens=64)
    it.submit("a", 3, n=5)
    it.finish()
    assert max(len(plan.runs) for plan in plans(it.world)) == 2


def test_the_newest_is_preempted_and_its_results_still_count(ring: type[Ring]) -> None:
    it = ring(num_blocks=8, block_size=4, depth=1)
    it.submit("old", 10, max_tokens=20)
    it.submit("new", 10, max_tokens=20, salt="shares nothing")
    while not it.world.core.stats().preemptions_total:
        it.steps(1)
    new = it.world.core.lifecycle.requests["new"].sequences[0]
    assert new.ticket, "the newest waits"
    assert new.awaits_results()
    known = new.num_tokens
    it.steps(1)
    assert new.num_tokens == known + 1  # tokens of the plan in flight
    it.finish()
    resumed = [s for p in plans(it.world) for s in p.starts if len(s.token_ids) // 4 > s.num_prompt_tokens]
    assert [len(s.token_ids) // 4 for s in resumed] == [known + 1]
    assert resumed[0].num_prompt_tokens == 10


def test_no_sequence_is_preempted_for_blocks_that_are_pending(ring: type[Ring]) -> None:
    it = ring(num_blocks=8, block_size=4, depth=1)
    it.submit("a", 9, max_tokens=6)
    it.submit("c", 1, max_tokens=20)
    it.submit("b", 12, max_tokens=4)
    it.steps(2)
    group = it.world.core.groups[it.worker.incarnation]
    assert group.kv_cache.blocks.num_free == 0
    it.journal("c").cancelled = True
    it.world.tell(it.gateway.incarnation, Cancel("c", 0))
    assert group.kv_cache.blocks.num_pending == 1
    it.steps(1)
    assert [run.slot for run in plans(it.world)[-1].runs] == [2], "a needs a block and waits for c's"
    it.finish()
    assert it.world.core.stats().preemptions_total == 0


def test_logprobs_that_were_not_delivered_are_computed_again(ring: type[Ring]) -> None:
    it = ring()
    it.submit("a", 5, max_tokens=30, num_logprobs=0)
    it.steps(6)
    out = it.output("a")
    it.world.tell(it.gateway.incarnation, it.gateway.again("a"))
    assert len(plans(it.world)[-1].starts) == 0, "the journal has all there is: it runs on"
    out.ids.pop()
    out.logprobs.pop()  # the last frame was lost
    it.world.tell(it.gateway.incarnation, it.gateway.again("a"))
    it.finish()


def test_cancel_frees_everything_and_closes_the_stream(ring: type[Ring]) -> None:
    it = ring()
    it.submit("a", 10, n=3, max_tokens=40)
    it.steps(3)
    it.journal("a").cancelled = True
    for _ in range(2):
        it.world.tell(it.gateway.incarnation, Cancel("a", 0))
    assert batches(it.world)[-1].closes == [Cancel("a", 0)]
    it.submit("b", 5)
    it.finish()


def test_cancel_of_an_earlier_attempt_or_an_unknown_id_is_ignored(ring: type[Ring]) -> None:
    it = ring()
    it.submit("a", 10, max_tokens=10)
    it.world.tell(it.gateway.incarnation, it.gateway.again("a"))
    it.world.tell(it.gateway.incarnation, Cancel("a", 0))
    it.world.tell(it.gateway.incarnation, Cancel("nobody", 9))
    it.finish()
    assert len(it.output("a").ids) == 10


def test_stop_ends_a_choice_without_a_final_step(ring: type[Ring]) -> None:
    it = ring()
    it.submit("a", 5, n=2, max_tokens=30)
    it.steps(3)
    it.world.tell(it.detokenizer.incarnation, Stop([StreamRef("a", 0, 1), StreamRef("a", 7, 0), StreamRef("x", 0, 0)]))
    del it.detokenizer.streams["a", 1]
    it.output("a", 1).finish = STOP  # the detokenizer has written it
    sent = len(batches(it.world))
    it.finish()
    assert {step.choice for batch in batches(it.world)[sent:] for step in batch.steps} == {0}


def test_the_same_generate_twice_is_answered_twice_and_run_once(ring: type[Ring]) -> None:
    it = ring()
    it.submit("a", 5, max_tokens=6)
    it.world.tell(it.gateway.incarnation, it.journal("a").frame)
    it.finish()
    assert sum(len(p.starts) for p in plans(it.world)) == 1
    assert len(it.output("a").ids) == 6
