"""What must be free before a prompt starts: --scheduler-reserve-full-isl and --watermark."""

import pytest

from ..conftest import Ring


def running(it: Ring) -> list[str]:
    return [each.sequence.request.id for group in it.world.core.groups.values() for each in group.running]


def test_a_prompt_starts_with_blocks_for_its_first_step_alone(ring: type[Ring]) -> None:
    """16 blocks of 4: a prompt of 40 tokens leaves 6 or, if blocks come step by step, 12 in its first step of 16."""
    for whole, begun in ((True, ["a"]), (False, ["a", "b"])):
        it = ring(depth=0, num_blocks=16, max_num_batched_tokens=16, reserve_whole_prompts=whole, prefix_caching=False)
        it.submit("a", 40, max_tokens=2)
        it.submit("b", 24, max_tokens=2)
        it.steps(1)
        assert running(it) == ["a"]
        it.steps(1)  # in the next plan the last 8 tokens of the first prompt leave tokens of the step
        assert running(it) == begun
        it.finish()


def test_prompts_that_do_not_fit_together_end_all_the_same(ring: type[Ring]) -> None:
    it = ring(
        depth=1, num_blocks=16, max_num_batched_tokens=8, max_num_seqs=4, reserve_whole_prompts=False, watermark=0.0
    )
    for name in "abcd":
        it.submit(name, 50, max_tokens=6)
    it.finish()
    assert [len(it.output(name).ids) for name in "abcd"] == [6] * 4


@pytest.mark.parametrize(("watermark", "starts"), [(None, True), (0.0, True), (0.5, False)])
def test_blocks_that_a_start_beside_others_leaves_free(ring: type[Ring], watermark: float | None, starts: bool) -> None:
    it = ring(depth=0, num_blocks=20, max_num_batched_tokens=64, watermark=watermark)
    it.submit("a", 20, max_tokens=9)  # alone it may take what it needs
    it.submit("b", 28, max_tokens=2)
    it.steps(1)
    assert running(it) == (["a", "b"] if starts else ["a"])
    it.finish()
