"""Beam searches in a batch give the same result as alone, also when beams are preempted or lost."""

import pytest

from blockyard.shared.messages import Beam, BeamStop, Cancel, FinishReason, SlotStart, StepPlan, TokenBatch

from ..conftest import Ring

PROMPT = [(i * 7 + 1) % 50 for i in range(22)]  # 5 full blocks of 4


def plans(it: Ring) -> list[StepPlan]:
    return [o.frame for o in it.world.sent if isinstance(o.frame, StepPlan)]


def starts(it: Ring) -> list[SlotStart]:
    return [start for plan in plans(it) for start in plan.starts]


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("width", [1, 2, 4])
def test_a_search_alone(ring: type[Ring], width: int, depth: int, named: bool) -> None:
    it = ring(depth=depth, max_num_seqs=8, prefix_caching=named)
    it.submit("a", 0, n=width, prompt=PROMPT, max_tokens=12, beam=Beam(width), temperature=0.0)
    it.finish()
    assert sum(run.max_tokens for plan in plans(it) for run in plan.runs) <= 22 + 12 * width, (
        "nothing is computed twice"
    )
    assert {s.num_computed for s in starts(it)[1:]} <= set(range(22, 35))
    texts = [step for o in it.world.sent if isinstance(o.frame, TokenBatch) for step in o.frame.steps]
    assert [(s.choice, s.first, s.finish is None) for s in texts] == [(i, 0, False) for i in range(width)]


def test_hypotheses_share_blocks_and_copy_the_last(ring: type[Ring]) -> None:
    it = ring(max_num_seqs=8, num_blocks=20, max_num_batched_tokens=64)
    it.submit("a", 0, n=4, prompt=PROMPT, max_tokens=16, beam=Beam(4), temperature=0.0)
    for _ in range(12):
        it.steps(1)
        assert it.world.core.stats().blocks_used <= 5 + 4 * 5
    it.finish()
    assert it.world.core.stats().preemptions_total == 0
    assert sum(len(plan.copies) for plan in plans(it)) > 3


@pytest.mark.parametrize("stop", list(BeamStop))
@pytest.mark.parametrize("penalty", [0.0, 1.0, -0.5, 2.0])
def test_searches_beside_others_with_too_few_blocks(ring: type[Ring], penalty: float, stop: BeamStop) -> None:
    """Hypotheses are preempted, also while they wait for their siblings, and no search holds up another."""
    it = ring(depth=1, num_blocks=14, max_num_seqs=5, eos_every=6)
    for i in range(4):
        it.submit(f"beam {i}", 5 + i, n=2, max_tokens=14, beam=Beam(3, penalty, stop), temperature=0.0)
        it.submit(f"plain {i}", 5 + i, n=2, max_tokens=14)
    it.finish()
    assert it.world.core.stats().preemptions_total


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3])
def test_a_search_wider_than_the_batch(ring: type[Ring], max_num_seqs: int) -> None:
    it = ring(max_num_seqs=max_num_seqs)
    it.submit("a", 6, n=4, max_tokens=10, beam=Beam(4), temperature=0.0)
    it.submit("b", 6, n=2, max_tokens=10)
    it.finish()


def test_a_lost_worker(ring: type[Ring]) -> None:
    it = ring(max_num_seqs=8)
    it.submit("a", 0, n=3, prompt=PROMPT, max_tokens=12, beam=Beam(3), temperature=0.0)
    it.steps(6)
    it.world.kill(it.worker.incarnation)
    it.worker = it.world.add_worker()
    it.finish()


def test_a_lost_detokenizer_starts_it_over(ring: type[Ring]) -> None:
    it = ring(max_num_seqs=8)
    it.submit("a", 0, n=3, prompt=PROMPT, max_tokens=12, beam=Beam(3), temperature=0.0, num_logprobs=1)
    it.steps(6)
    it.world.kill(it.detokenizer.incarnation)
    it.detokenizer = it.world.add_detokenizer()
    it.finish()
    assert all(len(p.top_ids) == 1 for i in range(3) for p in it.output("a", i).logprobs)


def test_cancel_frees_all_hypotheses(ring: type[Ring]) -> None:
    it = ring(max_num_seqs=8)
    it.submit("a", 0, n=2, prompt=PROMPT, max_tokens=30, beam=Beam(4), temperature=0.0)
    it.steps(5)
    assert it.world.core.stats().running > 2
    it.journal("a").cancelled = True
    it.world.tell(it.gateway.incarnation, Cancel("a", 0))
    assert it.world.core.stats().running == 0
    it.finish()


def test_the_context_ends_a_search(ring: type[Ring]) -> None:
    it = ring(max_model_len=16)
    it.submit("a", 10, n=2, max_tokens=30, beam=Beam(2, 0.0, BeamStop.NEVER), temperature=0.0, ignore_eos=True)
    it.finish()
    assert [it.output("a", i).finish for i in range(2)] == [FinishReason.LENGTH] * 2
    assert len(it.output("a").ids) == 6
