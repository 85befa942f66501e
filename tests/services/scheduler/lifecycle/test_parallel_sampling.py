"""Choices of one request compute their prompt once, also if the choice that computes it is lost or ends."""

import pytest

from blockyard.shared.messages import Cancel, FinishReason, SlotStart, StepPlan, Stop, StreamRef

from ..conftest import Ring

PROMPT = [(i * 7 + 1) % 50 for i in range(22)]  # 5 full blocks of 4


def plans(it: Ring) -> list[StepPlan]:
    return [o.frame for o in it.world.sent if isinstance(o.frame, StepPlan)]


def starts(it: Ring) -> list[SlotStart]:
    return [start for plan in plans(it) for start in plan.starts]


def num_prefilled(it: Ring) -> int:
    return sum(run.max_tokens for plan in plans(it) for run in plan.runs if run.max_tokens > 1)


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("num_batched", [8, 64])
@pytest.mark.parametrize("depth", [0, 1, 3])
def test_a_prompt_is_computed_once(ring: type[Ring], depth: int, num_batched: int, named: bool) -> None:
    it = ring(depth=depth, max_num_batched_tokens=num_batched, prefix_caching=named)
    it.submit("a", 0, n=4, prompt=PROMPT)
    it.submit("b", 3)
    it.finish()
    first, *parallel_sampling = [s for s in starts(it) if len(s.token_ids) // 4 == len(PROMPT)]
    assert [s.num_computed for s in (first, *parallel_sampling)] == [0, 21, 21, 21]
    assert {tuple(s.blocks[:5]) for s in parallel_sampling} == {tuple(first.blocks[:5])}, "full blocks are shared"
    assert len({s.blocks[5] for s in (first, *parallel_sampling)}) == 4, "the last one is not"
    copies = [copy for plan in plans(it) for copy in plan.copies]
    assert [copy.dst for copy in copies] == [s.blocks[5] for s in parallel_sampling]
    assert copies[0].src == first.blocks[5]
    assert num_prefilled(it) in (24, 25), "22, and what there is of the other's three beside them"


@pytest.mark.parametrize("depth", [0, 1])
def test_others_pass_choices_that_wait_for_a_long_prompt(ring: type[Ring], depth: int) -> None:
    it = ring(depth=depth, max_num_batched_tokens=8, prefix_caching=False)
    it.submit("a", 0, n=3, prompt=PROMPT)
    it.submit("b", 2)
    it.steps(5)
    order = [len(s.token_ids) // 4 for s in starts(it)]
    assert order[:2] == [22, 2]
    it.finish()


def test_a_prompt_that_ends_with_a_block(ring: type[Ring]) -> None:
    """Its last token is computed by each choice, so that its last block is each choice's own."""
    it = ring(prefix_caching=False)
    it.submit("a", 0, n=2, prompt=PROMPT[:20])
    it.finish()
    first, fork = starts(it)
    assert (fork.num_computed, fork.blocks[:4]) == (19, first.blocks[:4])
    assert first.blocks[4] not in fork.blocks


def test_a_prompt_of_one_token_is_not_shared(ring: type[Ring]) -> None:
    it = ring()
    it.submit("a", 1, n=3)
    assert len(plans(it)[0].starts) == 3
    it.finish()


@pytest.mark.parametrize("named", [True, False])
def test_the_next_sequence_computes_the_prompt_if_the_first_ends(ring: type[Ring], named: bool) -> None:
    it = ring(depth=0, max_num_batched_tokens=8, prefix_caching=named)
    it.submit("a", 0, n=3, prompt=PROMPT)
    it.steps(1)
    assert it.world.core.stats().waiting == 2
    it.world.detokenize(it.detokenizer)
    it.world.tell(it.detokenizer.incarnation, Stop([StreamRef("a", 0, 0)]))
    del it.detokenizer.streams["a", 0]
    it.output("a", 0).finish = FinishReason.STOP
    it.finish()
    assert [s.choice for s in starts(it)] == [0, 1, 2]
    assert starts(it)[2].num_computed == 21


@pytest.mark.parametrize("named", [True, False])
def test_a_lost_worker_in_the_middle_of_a_prompt(ring: type[Ring], named: bool) -> None:
    it = ring(max_num_batched_tokens=8, prefix_caching=named)
    it.submit("a", 0, n=3, prompt=PROMPT)
    it.steps(1)
    it.world.kill(it.worker.incarnation)
    it.worker = it.world.add_worker()
    it.finish()
    assert [s.num_computed for s in starts(it)] == [0, 0, 21, 21]


def test_a_preempted_fork_begins_with_the_prompt_of_a_sibling(ring: type[Ring]) -> None:
    it = ring(num_blocks=12, prefix_caching=False)
    it.submit("older", 9, max_tokens=12)
    it.submit("a", 0, n=2, prompt=PROMPT[:14], max_tokens=12)
    it.finish()
    assert it.world.core.stats().preemptions_total
    resumed = [s for s in starts(it) if len(s.token_ids) // 4 > 14]
    assert resumed
    assert max(s.num_computed for s in resumed) == 14


def test_choices_are_cancelled_while_they_are_parked(ring: type[Ring]) -> None:
    it = ring(max_num_batched_tokens=8)
    it.submit("a", 0, n=3, prompt=PROMPT)
    assert it.world.core.stats().waiting == 2
    it.journal("a").cancelled = True
    it.world.tell(it.gateway.incarnation, Cancel("a", 0))
    assert it.world.core.stats().waiting == 0
    it.finish()


def test_resumed_choices_share_their_prompt(ring: type[Ring]) -> None:
    """Each continues after its own tokens; they share the whole prompt."""
    it = ring(max_num_batched_tokens=64, prefix_caching=False)
    it.submit("a", 0, n=3, prompt=PROMPT, max_tokens=20)
    it.steps(6)
    it.world.kill(it.worker.incarnation)
    it.worker = it.world.add_worker()
    before = len(starts(it))
    it.finish()
    assert [s.num_computed for s in starts(it)[before:]] == [0, 22, 22]


def test_prompt_logprobs_come_from_the_sequence_that_computed_the_prompt(ring: type[Ring]) -> None:
    it = ring(max_num_batched_tokens=8)
    it.submit("a", 0, n=3, prompt=PROMPT, num_prompt_logprobs=1)
    it.finish()
    assert [len(it.output("a", i).prompt_logprobs) for i in range(3)] == [21, 0, 0]


def test_prompt_logprobs_that_were_lost_are_computed_again(ring: type[Ring]) -> None:
    """The choice that computed them has ended, and a sibling that shares its prompt runs on without them."""
    it = ring(depth=0, max_num_batched_tokens=64)
    it.submit("a", 0, n=2, prompt=PROMPT, max_tokens=20, num_prompt_logprobs=1)
    while len(starts(it)) < 2:
        it.world.work(it.worker)
    lost, it.detokenizer = it.detokenizer, it.world.add_detokenizer()
    it.world.tell(lost.incarnation, Stop([StreamRef("a", 0, 0)]))  # a stop string was found
    it.world.kill(lost.incarnation)  # with all results of choice 0
    it.finish()
    assert [s.num_computed for s in starts(it)] == [0, 21, 0]
    assert len(it.output("a", 0).prompt_logprobs) == 21
