"""Prefix caching through the core: which blocks a request finds, and which are evicted first."""

import msgspec
import pytest

from blockyard.shared.block_hashes import HASH_BYTES, block_hashes, root_hash
from blockyard.shared.messages import (
    Attached,
    Cancel,
    ExtraKey,
    FinishReason,
    SlotResult,
    SlotStart,
    StepPlan,
    StepResult,
    Stop,
    StreamRef,
)

from ..conftest import Ring
from ..harness.fakes import ids_bytes
from ..harness.world import SCOPE

PROMPT = list(range(100, 122))  # 5 blocks of 4 tokens, and 2 tokens


def plans(it: Ring) -> list[StepPlan]:
    return [o.frame for o in it.world.sent if isinstance(o.frame, StepPlan)]


def starts(it: Ring) -> list[SlotStart]:
    return [start for plan in plans(it) for start in plan.starts]


def index_of(it: Ring) -> dict[bytes, int]:
    blocks = it.world.groups.attached[it.worker.incarnation].kv_cache.blocks
    names = ((blocks.index.hash_of(block), block) for block in range(blocks.num_ids))
    return {name: block for name, block in names if name is not None}


def names_of(ids: list[int], salt: str = "") -> list[bytes]:
    names = block_hashes(root_hash(SCOPE, cache_salt=salt), ids_bytes(ids), 4)
    return [names[i : i + HASH_BYTES] for i in range(0, len(names), HASH_BYTES)]


def after(it: Ring, first: list[int], then: list[int], **more: object) -> int:
    """Cached tokens of a request after another one has finished."""
    it.submit("first", 0, prompt=first, max_tokens=2)
    it.world.settle()
    it.submit("then", 0, prompt=then, **more)
    it.finish()
    assert it.output("first").num_cached_tokens == 0
    cached = it.output("then").num_cached_tokens
    assert cached == starts(it)[-1].num_computed
    return cached


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_a_prompt_seen_before_is_found(ring: type[Ring], depth: int) -> None:
    it = ring(depth=depth)
    assert after(it, PROMPT, PROMPT) == 20
    stats = it.world.core.stats()
    assert (stats.prefix_queries_total, stats.prefix_hits_total) == (44, 20)
    assert sum(run.max_tokens for plan in plans(it) for run in plan.runs if run.max_tokens > 1) == 22 + 2


def test_without_prefix_caching_nothing_is_found_or_hashed(ring: type[Ring]) -> None:
    it = ring(prefix_caching=False)
    assert after(it, PROMPT, PROMPT) == 0
    assert it.world.core.stats().prefix_queries_total == 0
    assert not any(plan.full_blocks for plan in plans(it))


def test_a_common_beginning_is_found_up_to_the_first_difference(ring: type[Ring]) -> None:
    assert after(ring(), PROMPT, [*PROMPT[:13], 7, *PROMPT[14:]]) == 12


@pytest.mark.parametrize("kept", [0, 1], ids=["hashed here", "hashed by the tokenizer"])
def test_requests_with_other_extra_keys_at_block_2_share_blocks_0_and_1_alone(ring: type[Ring], kept: int) -> None:
    """An image may have its tokens from block 2 on: what is before it is the same text."""
    it = ring()
    if kept:
        it.submit("other", 3, max_tokens=1)  # every other request carries its hashes
        it.world.settle()
    for name, digest in (("one", b"a"), ("two", b"b"), ("one again", b"a"), ("none", b"")):
        keys = [ExtraKey(9, 14, digest * 16)] if digest else []
        it.submit(name, 0, prompt=PROMPT, max_tokens=9, extra_keys=keys)
        it.world.settle()
    it.finish()
    found = [it.output(name).num_cached_tokens for name in ("one", "two", "one again", "none")]
    assert found == [0, 8, 20, 8]
    blocks = [start.blocks for start in starts(it)[-4:]]
    assert blocks[0][:2] == blocks[1][:2] == blocks[3][:2]
    assert {*blocks[0][2:]}.isdisjoint(blocks[1][2:]), "block 2 and all behind it are other blocks"


def test_generated_blocks_contain_the_extra_keys_of_their_request(ring: type[Ring]) -> None:
    """An adapter is such a key: all tokens depend on it."""
    it = ring()
    for name, digest in (("one", b"a"), ("two", b"b"), ("again", b"a")):
        it.submit(name, 0, prompt=PROMPT, max_tokens=9, extra_keys=[ExtraKey(0, 1 << 40, digest * 16)])
        it.world.settle()
    longer = [*PROMPT, *it.output("one").ids[:8], 1]
    it.submit("longer", 0, prompt=longer, max_tokens=1, extra_keys=[ExtraKey(0, 1 << 40, b"a" * 16)])
    it.finish()
    assert [it.output(name).num_cached_tokens for name in ("one", "two", "again", "longer")] == [0, 0, 20, 28]


def test_the_last_prompt_token_is_computed_even_if_its_block_is_known(ring: type[Ring]) -> None:
    it = ring()
    assert after(it, PROMPT[:20], PROMPT[:20]) == 16
    assert starts(it)[0].blocks[4] not in starts(it)[1].blocks


def test_a_request_with_its_own_salt_finds_no_blocks_of_others(ring: type[Ring]) -> None:
    assert after(ring(), PROMPT, PROMPT, salt="tenant") == 0
    it = ring()
    it.submit("a", 0, prompt=PROMPT, salt="tenant")
    it.world.settle()
    it.submit("b", 0, prompt=PROMPT, salt="tenant")
    it.finish()
    assert it.output("b").num_cached_tokens == 20


def test_prompt_logprobs_are_computed_but_their_blocks_serve_others(ring: type[Ring]) -> None:
    it = ring()
    it.submit("a", 0, prompt=PROMPT, num_prompt_logprobs=0)
    it.world.settle()
    it.submit("b", 0, prompt=PROMPT, num_prompt_logprobs=0)
    it.submit("c", 0, prompt=PROMPT)
    it.finish()
    assert [it.output(r).num_cached_tokens for r in "abc"] == [0, 0, 20]


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_the_next_turn_of_a_conversation_finds_generated_blocks(ring: type[Ring], depth: int) -> None:
    it = ring(depth=depth)
    it.submit("a", 0, prompt=PROMPT, max_tokens=12)
    it.world.settle()
    turn = PROMPT + it.output("a").ids
    assert set(names_of(turn[:33])) <= index_of(it).keys()  # the 34th token was sampled and never computed
    it.submit("b", 0, prompt=[*turn, 1, 2, 3])
    it.finish()
    assert it.output("b").num_cached_tokens == 32


def test_generated_blocks_after_a_short_prompt_are_hashed(ring: type[Ring]) -> None:
    it = ring()
    it.submit("a", 0, prompt=[5], max_tokens=12, salt="s")
    it.finish()
    assert set(names_of([5, *it.output("a").ids[:11]], "s")) == index_of(it).keys()


def test_blocks_that_a_plan_fills_are_found_by_the_next_plan(ring: type[Ring]) -> None:
    it = ring(depth=2, max_num_batched_tokens=64)
    it.submit("a", 0, prompt=PROMPT, max_tokens=2)
    it.submit("b", 0, prompt=PROMPT)
    first, _, third = plans(it)
    assert [n.block_hash for n in first.full_blocks] == names_of(PROMPT)
    assert [n.block for n in first.full_blocks] == first.starts[0].blocks[:5]
    assert (third.starts[0].num_computed, third.starts[0].blocks[:5]) == (20, first.starts[0].blocks[:5])
    assert not third.full_blocks
    it.finish()


@pytest.mark.parametrize("num_batched", [8, 64])
def test_requests_that_come_together_share_their_prompt(ring: type[Ring], num_batched: int) -> None:
    it = ring(max_num_batched_tokens=num_batched, depth=1)
    for name in "abcd":
        it.submit(name, 0, prompt=PROMPT)
    assert len(plans(it)[0].starts) == 1, "the others wait for what this plan computes"
    it.steps(4)
    tables = [start.blocks[:5] for start in starts(it)]
    assert tables == [tables[0]] * 4
    assert it.world.core.stats().blocks_used <= 5 + 4 * 2
    it.finish()
    assert [it.output(name).num_cached_tokens for name in "abcd"] == [0, 20, 20, 20]
    assert sum(run.max_tokens for plan in plans(it) for run in plan.runs if run.max_tokens > 1) == 22 + 3 * 2


def test_requests_without_a_common_prefix_do_not_wait_for_each_other(ring: type[Ring]) -> None:
    it = ring(max_num_batched_tokens=64, depth=0)
    for name, first in (("a", 1), ("b", 2), ("c", 3)):
        it.submit(name, 0, prompt=[first, *PROMPT])
    it.steps(1)
    assert [len(plan.starts) for plan in plans(it)[:2]] == [1, 2]
    it.finish()


def test_eviction_is_least_recently_used_and_children_before_parents(ring: type[Ring]) -> None:
    it = ring(num_blocks=12, depth=0)
    for name, prompt in (("old", PROMPT[:17]), ("new", [3, *PROMPT[:16]]), ("old again", PROMPT[:17])):
        it.submit(name, 0, prompt=prompt, max_tokens=1)
        it.world.settle()
    old, new = names_of(PROMPT[:17]), names_of([3, *PROMPT[:16]])
    it.submit("big", 0, prompt=list(range(200, 225)), max_tokens=1)  # 7 blocks: 4 of 12 are not cached
    it.world.settle()
    assert set(old) <= index_of(it).keys()
    assert [name in index_of(it) for name in new] == [True, False, False, False]
    it.finish()


def test_blocks_in_use_are_not_evicted(ring: type[Ring]) -> None:
    it = ring(num_blocks=8, depth=1)
    it.submit("a", 0, prompt=PROMPT[:9], max_tokens=12)
    it.steps(1)
    it.submit("b", 0, prompt=PROMPT[:9], max_tokens=1)
    it.submit("c", 0, prompt=list(range(200, 212)), max_tokens=4)
    it.finish()
    assert it.output("b").num_cached_tokens == 8


def test_cached_blocks_without_a_holder_count_as_free(ring: type[Ring]) -> None:
    it = ring(num_blocks=8, depth=0)
    it.submit("a", 0, prompt=PROMPT, max_tokens=8)
    it.world.settle()
    stats = it.world.core.stats()
    assert (stats.blocks_used, stats.blocks_total) == (0, 8)
    it.submit("b", 0, prompt=[1] * 28, max_tokens=4)
    it.finish()
    assert len(it.output("b").ids) == 4


def test_found_blocks_do_not_count_as_free_at_admission(ring: type[Ring]) -> None:
    """8 blocks, of which 5 are cached and all 5 found: 3 are left for new tokens, not 8."""
    it = ring(num_blocks=8, depth=0, max_num_batched_tokens=64)
    it.submit("a", 0, prompt=PROMPT, max_tokens=1)
    it.world.settle()
    it.submit("x", 0, prompt=[1, 2, 3, 4, 5], max_tokens=8)
    it.steps(1)
    it.submit("b", 0, prompt=[*PROMPT, *range(6)], max_tokens=1)
    assert it.world.core.stats().waiting == 1
    it.finish()


def test_a_preempted_choice_finds_its_own_blocks(ring: type[Ring]) -> None:
    it = ring(num_blocks=9, block_size=4, depth=1)
    it.submit("old", 0, prompt=PROMPT[:10], max_tokens=20)
    it.submit("new", 0, prompt=[9, *PROMPT[:9]], max_tokens=20)
    while not it.world.core.stats().preemptions_total:
        it.steps(1)
    it.finish()
    resumed = [s for s in starts(it) if len(s.token_ids) // 4 > s.num_prompt_tokens]
    assert resumed[0].num_computed >= 4
    assert it.output("new").num_cached_tokens == 0, "its own tokens are no hit of the request"


def test_a_freed_block_may_be_read_before_the_plan_in_flight_is_done(ring: type[Ring]) -> None:
    it = ring(depth=1, max_num_batched_tokens=64)
    it.submit("a", 0, prompt=PROMPT, max_tokens=20)
    assert len(it.worker.in_flight) == 2
    it.journal("a").cancelled = True
    it.world.tell(it.gateway.incarnation, Cancel("a", 0))
    it.submit("b", 0, prompt=PROMPT, max_tokens=2)
    it.steps(1)  # one of a's plans
    assert starts(it)[-1].num_computed == 20
    assert starts(it)[-1].blocks[:5] == starts(it)[0].blocks[:5]
    it.finish()


def test_an_attached_worker_keeps_its_cached_blocks(ring: type[Ring]) -> None:
    """After OutOfStep the scheduler sends the same Attach as a new scheduler."""
    it = ring(depth=1)
    it.submit("a", 0, prompt=PROMPT, max_tokens=20)
    it.steps(10)
    known = len(it.output("a").ids)
    it.worker.skip()
    it.finish()
    first, again = starts(it)
    assert known > 8
    assert again.num_computed >= (len(PROMPT) + known - 2) // 4 * 4 - 4
    assert again.blocks[:6] == first.blocks[:6]


def test_hashes_that_do_not_match_the_blocks_are_ignored(ring: type[Ring]) -> None:
    it = ring()
    group = it.world.groups.attached[it.worker.incarnation]
    for blocks, names in (([1, 2], b"x" * 16), ([1, 99], b"x" * 16 + b"y" * 16), ([1, -1], b"x" * 16 + b"y" * 16)):
        frame = Attached(1, group.geometry, blocks, names)
        group.kv_cache.restore(frame)
    assert not index_of(it)


def test_blocks_of_a_lost_worker_are_forgotten(ring: type[Ring]) -> None:
    it = ring()
    it.submit("a", 0, prompt=PROMPT, max_tokens=20)
    it.steps(4)
    it.world.kill(it.worker.incarnation)
    it.worker = it.world.add_worker()
    it.finish()
    assert starts(it)[-1].num_computed == 0


@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize(("prompt", "named"), [(PROMPT, True), (PROMPT, False), (PROMPT[:3], True)])
def test_no_sequence_goes_on_with_blocks_of_a_failed_slot(
    ring: type[Ring], ended: bool, prompt: list[int], named: bool
) -> None:
    """The second choice reads blocks of the first, which has failed: it starts over with the right output."""
    it = ring(depth=1, max_num_batched_tokens=64, prefix_caching=named)
    it.submit("a", 0, n=2, prompt=prompt, max_tokens=20)
    it.world.detokenize(it.detokenizer)
    assert [s.num_computed for s in starts(it)] == [0, len(prompt) - 1]
    if ended:  # before the scheduler hears of its failure
        it.world.tell(it.detokenizer.incarnation, Stop([StreamRef("a", 0, 0)]))
        del it.detokenizer.streams["a", 0]
    assert set(names_of(prompt) if named else []) == index_of(it).keys()
    runner, answer = it.worker.runner, it.worker.links.answer

    def fail(to: int, frame: StepResult) -> bool:
        failed = [SlotResult(s.slot, [], len(prompt), FinishReason.FAILED, detail="not a number") for s in frame.slots]
        return answer(to, msgspec.structs.replace(frame, slots=failed))

    it.worker.links.answer = fail
    it.world.work(it.worker)
    it.world.work(it.worker)
    it.world.work(it.worker)  # both plans were received, the first has run
    it.worker.links.answer = answer
    runner.block_hashes.hashes.clear()
    assert not index_of(it)
    it.world.settle()
    assert [s.num_computed for s in starts(it)] == [0, len(prompt) - 1, 0]
    assert starts(it)[2].token_ids == ids_bytes(prompt), "what was made of it is dropped"
    assert (it.output("a", 0).finish is None) == ended
    it.journal("a").outputs.pop(0)
    it.finish()
    assert len(it.output("a", 1).ids) == 20


def test_hashes_are_sent_with_the_plan_and_none_is_stale(ring: type[Ring]) -> None:
    """The worker's hashes are the ones of the index, or of blocks that were evicted since."""
    it = ring(num_blocks=10, depth=1)
    for i in range(12):
        it.submit(f"{i}", 0, prompt=[i % 4, *PROMPT[: 9 + i]], max_tokens=6)
        it.world.settle()
    names = it.worker.runner.block_hashes.hashes
    index = {block: name for name, block in index_of(it).items()}
    assert len(names) > 4
    assert all(index.get(block, name) == name for block, name in names.items())
