"""What a scheduler keeps of ended requests and lost workers: counters, but no prompts or log-probabilities."""

import gc
from dataclasses import replace
from types import FunctionType, ModuleType
from typing import TypeVar

from blockyard.services.scheduler.sequences.requests import Request
from blockyard.shared.messages import Generate, TokenLogprobs, TokenStep

from .conftest import Ring

T = TypeVar("T")
GAUGES = ("blocks_total", "host_blocks_total")  # current counts


def held(root: object, kind: type[T]) -> list[T]:
    """All objects of this type that are reachable from another object."""
    found: list[T] = []
    seen: set[int] = set()
    todo = [root]
    while todo:
        one = todo.pop()
        if id(one) in seen or isinstance(one, type | ModuleType | FunctionType):
            continue
        seen.add(id(one))
        if isinstance(one, kind):
            found.append(one)
        todo += gc.get_referents(one)
    return found


def steps_of(it: Ring, request_id: str) -> list[TokenStep]:
    batches = (o.frame for o in it.world.sent)
    return [s for b in batches for s in getattr(b, "steps", ()) if s.request_id == request_id]


def test_log_probabilities_leave_with_the_step_that_brings_them(ring: type[Ring]) -> None:
    it = ring(max_num_batched_tokens=8)
    it.submit("a", 20, n=2, max_tokens=30, num_logprobs=2, num_prompt_logprobs=1)
    it.steps(12)
    assert len(it.output("a").logprobs) > 3 and len(it.output("a").prompt_logprobs) == 19
    assert held(it.world.core, TokenLogprobs) == []
    assert len(held(it.world.core, Request)) == 1, "`held` sees what is there"
    it.finish()


def test_log_probabilities_that_a_dead_detokenizer_had_are_computed_again(ring: type[Ring]) -> None:
    """The journal that is checked at the end has one entry for each token and each prompt position."""
    it = ring(max_num_batched_tokens=8)
    it.submit("a", 20, n=2, max_tokens=20, num_logprobs=2, num_prompt_logprobs=1)
    it.submit("prompt", 20, max_tokens=1, num_prompt_logprobs=1)
    for _ in range(6):
        it.world.work(it.worker)  # the detokenizer reads none of it
        it.detokenizer.inbox.clear()
    it.world.add_detokenizer()
    it.world.kill(it.detokenizer.incarnation)
    it.finish()
    assert [len(it.output("a", i).logprobs) for i in range(2)] == [20, 20]


def test_a_request_that_has_ended_is_not_kept(ring: type[Ring]) -> None:
    """Its prompt may be 128 KiB. The clock stands still, so that a request kept until a timeout would be found."""
    it = ring(policy="fair")
    for i in range(6):
        it.submit(f"{i}", 8, max_tokens=4)
    it.finish()
    assert held(it.world.core, Request) == []
    assert held(it.world.core, Generate) == []


def test_cached_tokens_are_sent_again_if_the_first_report_was_lost(ring: type[Ring]) -> None:
    it = ring()
    it.submit("first", 12, max_tokens=1)
    it.world.settle()
    it.submit("again", 12, max_tokens=20)
    while not it.world.core.lifecycle.requests["again"].sequences[0].outputs:
        it.world.work(it.worker)
    it.detokenizer.inbox.clear()  # the first tokens are lost with it
    it.world.add_detokenizer()
    it.world.kill(it.detokenizer.incarnation)
    assert [step.cached_tokens for step in steps_of(it, "again") if step.first == 0 and step.attempt] == [8]
    it.finish()


def test_tokens_that_an_earlier_attempt_computed_are_no_cache_hit(ring: type[Ring]) -> None:
    """The gateway's ids differ from the known ones: the request starts over and finds its own prompt in the cache."""
    it = ring()
    it.submit("a", 12, max_tokens=20)
    it.steps(4)
    it.output("a").ids[:] = []
    it.world.tell(it.gateway.incarnation, it.gateway.again("a"))
    it.output("a").num_cached_tokens = None
    it.world.core.lifecycle.drop(it.world.core.lifecycle.requests["a"])
    it.world.tell(it.gateway.incarnation, it.gateway.again("a"))
    it.finish()
    assert it.output("a").num_cached_tokens == 0


def test_capacity_and_card_follow_the_remaining_groups(ring: type[Ring]) -> None:
    it = ring(max_model_len=64)
    core, shape = it.world.core, it.world.shape
    large, notes = core.card, core.notes
    it.world.shape = replace(shape, max_model_len=32)
    small = it.world.add_worker()
    it.world.settle()
    assert large is not None and core.card is not None
    assert (large.max_model_len, core.card.max_model_len) == (64, 32)
    it.world.kill(small.incarnation)
    it.world.shape = shape
    assert core.card == large and core.notes == notes
    it.submit("long", 40, max_tokens=8)
    it.finish()
    assert it.journal("long").refused is None
    it.world.kill(it.worker.incarnation)
    assert core.card == large, "requests wait for a worker"


def test_counters_do_not_fall_when_a_worker_dies(ring: type[Ring]) -> None:
    it = ring(num_blocks=8, num_host_blocks=16)
    second = it.world.add_worker()
    for i in range(12):
        it.submit(f"{i}", 12 + i % 4, max_tokens=8)
        it.world.settle()
    before = it.world.core.stats()
    assert before.blocks_saved_total and before.blocks_fetched_total
    it.world.kill(it.worker.incarnation)
    it.world.blink(second.incarnation)
    after = it.world.core.stats()
    totals = [name for name in after.__struct_fields__ if name.endswith("_total")]
    counters = {name: (getattr(before, name), getattr(after, name)) for name in totals if name not in GAUGES}
    assert all(now >= then for then, now in counters.values()), counters
