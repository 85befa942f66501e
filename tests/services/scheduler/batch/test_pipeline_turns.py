"""Plans of a worker with pipeline stages: which sequences are in which of the plans under way."""

import pytest

from blockyard.services.scheduler.batch.pipeline_turns import PipelineTurn
from blockyard.services.scheduler.batch.plan_builder import PlanRecord
from blockyard.services.scheduler.batch.worker_groups import WorkerGroup

from ..conftest import Ring


def group_of(it: Ring) -> WorkerGroup:
    (group,) = it.world.core.groups.values()
    return group


def decodes_under_way(it: Ring) -> list[int]:
    """The number of decodes of each plan under way, oldest first."""
    return [record.load.decodes for record in group_of(it).in_flight]


def test_one_stage_has_no_turns(ring: type[Ring]) -> None:
    assert group_of(ring()).turns is None


def turns_of(it: Ring, record: PlanRecord) -> list[PipelineTurn]:
    """The turns of a plan under way."""
    turns = group_of(it).turns
    assert turns is not None
    return [turn for turn in turns._turns if record.number in turn.plans]


def check_needed_plans(it: Ring) -> None:
    """The last plan needs no tokens of plans under way but for those of its turn, and older ones."""
    *earlier, last = group_of(it).in_flight
    (turn,) = turns_of(it, last)
    before = max((number for number in turn.plans if number < last.number), default=0)
    for running in last.all_sequences():
        samples = running.num_scheduled_tokens > running.prefill_end
        needed = [one.number for one in earlier if samples and running in one.all_sequences()]
        assert max(needed, default=0) <= before


@pytest.mark.parametrize(("num_stages", "expected"), [(2, [4, 3]), (3, [3, 2, 2])])
@pytest.mark.parametrize("depth", [1, None])
def test_sequences_are_dealt_out(ring: type[Ring], num_stages: int, expected: list[int], depth: int | None) -> None:
    """A plan for each stage is under way, and one more is ahead."""
    it = ring(num_stages=num_stages, depth=depth, num_blocks=200, max_num_seqs=8, max_num_batched_tokens=64)
    for i in range(7):
        it.submit(str(i), 5, max_tokens=40)
    for _ in range(20):
        it.steps(1)
        check_needed_plans(it)
    *found, ahead = decodes_under_way(it)
    assert sorted(found, reverse=True) == expected and ahead in expected
    it.finish()


def test_lockstep_has_one_plan(ring: type[Ring]) -> None:
    it = ring(num_stages=2, depth=0, num_blocks=200)
    for i in range(4):
        it.submit(str(i), 5, max_tokens=20)
    for _ in range(10):
        it.steps(1)
        assert len(group_of(it).in_flight) == 1
    it.finish()


def test_what_is_left_is_dealt_out_again(ring: type[Ring]) -> None:
    """Those of one turn end first."""
    it = ring(num_stages=2, num_blocks=200, max_num_seqs=8, max_num_batched_tokens=64)
    for i in range(8):
        it.submit(str(i), 5, max_tokens=12 if i % 2 else 50)
    it.steps(12)
    assert sorted(decodes_under_way(it)) == [4, 4, 4]
    it.steps(24)
    assert sorted(decodes_under_way(it)) == [2, 2, 2]
    it.finish()


def test_long_contexts_count_more(ring: type[Ring]) -> None:
    it = ring(
        num_stages=2, num_blocks=400, block_size=16, max_num_seqs=8, max_model_len=2048, max_num_batched_tokens=2048
    )
    for i, length in enumerate((1500, 5, 5, 5, 5)):
        it.submit(str(i), length, max_tokens=30)
    it.steps(16)
    assert sorted(decodes_under_way(it)[:2]) == [1, 4]
    it.finish()


def test_chunks_of_a_prompt_do_not_wait_for_one_another(ring: type[Ring]) -> None:
    it = ring(num_stages=3, num_blocks=200, max_num_batched_tokens=8, max_model_len=200)
    it.submit("a", 60)
    assert [record.chunk_sizes for record in group_of(it).in_flight] == [{0: 8}] * 4
    it.finish()


def test_chunks_shrink_as_their_context_grows(ring: type[Ring]) -> None:
    it = ring(num_stages=2, balanced_context=40, num_blocks=200, max_num_batched_tokens=32, max_model_len=300)
    it.submit("a", 250)
    chunks = [record.chunk_sizes[0] for record in group_of(it).in_flight]
    while sum(chunks) < 250:
        it.steps(1)
        chunks.append(group_of(it).in_flight[-1].chunk_sizes[0])
    assert chunks[:2] == [32, 21] and chunks[-2] < 10
    assert chunks[:-1] == sorted(chunks[:-1], reverse=True)
    it.finish()


def test_a_sequence_alone_has_one_plan_ahead(ring: type[Ring]) -> None:
    """All others stay free for sequences that come."""
    it = ring(num_stages=2, num_blocks=200)
    it.submit("a", 5, max_tokens=30)
    it.steps(2)
    for _ in range(10):
        it.steps(1)
        assert decodes_under_way(it) == [1, 1]
    it.finish()
