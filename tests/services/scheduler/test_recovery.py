"""How the core reacts when a member is lost, or a gateway sends a request again."""

import pytest

from blockyard.services.scheduler.core import FencedError
from blockyard.shared.messages import (
    Attach,
    Attached,
    Control,
    ControlVerb,
    Fenced,
    FinishReason,
    Geometry,
    OutOfStep,
    StepPlan,
    StepResult,
    TokenBatch,
)

from .conftest import Ring
from .harness.fakes import ids_bytes
from .harness.world import World

LENGTH, STOP = FinishReason.LENGTH, FinishReason.STOP


def plans(world: World) -> list[StepPlan]:
    return [o.frame for o in world.sent if isinstance(o.frame, StepPlan)]


def batches(world: World) -> list[TokenBatch]:
    return [o.frame for o in world.sent if isinstance(o.frame, TokenBatch)]


@pytest.mark.parametrize("lost", ["detokenizer", "worker"])
def test_a_death_in_mid_stream_loses_and_repeats_nothing(ring: type[Ring], lost: str) -> None:
    it = ring()
    it.submit("a", 5, n=2, max_tokens=30)
    it.steps(6)
    if lost == "detokenizer":
        it.world.work(it.worker)
        it.world.work(it.worker)  # the text of these plans is lost with the detokenizer
        it.world.kill(it.detokenizer.incarnation)
        it.world.settle()
        it.world.add_detokenizer()
    else:
        it.world.kill(it.worker.incarnation)
        it.world.settle()
        assert it.world.core.stats().waiting == 2
        it.world.add_worker()
    it.finish()
    assert [len(it.output("a", i).ids) for i in range(2)] == [30, 30]


def test_a_rebound_request_runs_on_and_only_its_stream_is_new(ring: type[Ring]) -> None:
    it = ring()
    it.submit("a", 5, max_tokens=30)
    it.steps(6)
    second = it.world.add_detokenizer()
    it.world.kill(it.detokenizer.incarnation)
    opened = [new for batch in batches(it.world) for new in batch.opens][-1]
    assert (opened.attempt, opened.chars_sent) == (1, len(it.output("a").ids))
    assert it.journal("a").detokenizer == second.incarnation
    it.finish()
    assert sum(len(p.starts) for p in plans(it.world)) == 1


def test_a_request_starts_over_if_its_ids_are_no_prefix_of_the_known_ids(ring: type[Ring]) -> None:
    it = ring()
    it.submit("a", 5, max_tokens=30)
    it.steps(6)
    it.output("a").ids[:] = [1, 2, 3]
    frame = it.gateway.again("a")
    it.world.tell(it.gateway.incarnation, frame)
    it.steps(3)
    start = [s for p in plans(it.world) for s in p.starts][-1]
    assert start.token_ids == frame.prompt_ids + ids_bytes([1, 2, 3])
    assert start.num_prompt_tokens == 5


def test_choices_that_are_no_longer_listed_end(ring: type[Ring]) -> None:
    it = ring()
    it.submit("a", 5, n=3, max_tokens=20)
    it.steps(4)
    it.output("a", 1).finish = STOP  # the gateway has its final delta, the scheduler does not know yet
    it.world.tell(it.gateway.incarnation, it.gateway.again("a"))
    assert sorted(it.world.core.lifecycle.requests["a"].sequences) == [0, 2]
    it.finish()


def test_a_choice_that_comes_back_complete_ends_at_once(ring: type[Ring]) -> None:
    it = ring()
    frame = it.gateway.new("a", [1, 2, 3], it.world.sampling(max_tokens=2), 1)
    out = it.output("a")
    out.ids += [it.world.pattern.token(frame.sampling, 0, p, [1, 2, 3], []) for p in (3, 4)]
    it.world.tell(it.gateway.incarnation, it.gateway.again("a"))
    it.finish()
    assert out.finish is LENGTH
    assert not plans(it.world)


def test_a_cut_link_to_a_detokenizer_is_told_to_the_gateways(ring: type[Ring]) -> None:
    """Two requests run; all tokens of a third are sampled, but their text was lost on the link."""
    it = ring()
    it.submit("short", 5, max_tokens=3)
    it.submit("a", 5, n=2, max_tokens=30)
    for _ in range(10):
        it.world.work(it.worker)
    assert "short" not in it.world.core.lifecycle.requests
    it.world.blink(it.detokenizer.incarnation)
    assert it.gateway.lost == {"short", "a"}
    it.finish()
    assert [it.journal(name).frame.attempt for name in ("short", "a")] == [1, 1]
    assert len([s for p in plans(it.world) for s in p.starts if s.choice == 1]) == 1, "it ran on meanwhile"


def test_gateways_are_told_once_there_is_a_detokenizer(ring: type[Ring]) -> None:
    it = ring()
    it.submit("a", 5, max_tokens=30)
    it.steps(3)
    del it.world.detokenizers[it.detokenizer.incarnation]
    it.world.core.on_member_lost(it.detokenizer.incarnation)  # only the scheduler is told
    it.world.turn()
    assert not it.gateway.lost, "a request that arrives while no stream can be opened loses nothing"
    other = it.world.add_detokenizer()
    assert it.gateway.lost == {"a"}
    it.finish()
    assert it.journal("a").detokenizer == other.incarnation
    assert sum(len(p.starts) for p in plans(it.world)) == 1


@pytest.mark.parametrize("waiting", [False, True])
def test_a_gateway_that_returns_to_the_list_is_told_that_its_requests_were_dropped(
    ring: type[Ring], waiting: bool
) -> None:
    it = ring(max_num_seqs=1)
    it.submit("a", 5, max_tokens=30)
    if waiting:
        it.submit("b", 5, max_tokens=30)
    it.steps(3)
    it.world.blink(it.gateway.incarnation)
    assert it.gateway.lost == ({"a", "b"} if waiting else {"a"})
    it.finish()


def test_text_that_a_detokenizer_cannot_send_is_requested_again(ring: type[Ring]) -> None:
    it = ring()
    other = it.world.add_gateway()
    it.submit("a", 5, max_tokens=30)
    it.world.submit(other, "b", 5, max_tokens=30)
    it.steps(3)
    it.world.lose_text(it.detokenizer, other)
    assert (it.gateway.lost, other.lost) == (set(), {"b"})
    it.finish()


def test_a_dead_gateway_takes_its_requests_with_it(ring: type[Ring]) -> None:
    it = ring()
    it.submit("a", 5, max_tokens=30)
    it.steps(2)
    it.world.kill(it.gateway.incarnation)
    it.finish()


def test_out_of_step_means_attach_again(ring: type[Ring]) -> None:
    it = ring()
    it.submit("a", 5, max_tokens=30)
    it.steps(4)
    it.worker.skip()
    it.finish()
    assert sum(isinstance(o.frame, Attach) for o in it.world.sent) == 2
    assert len(it.output("a").ids) == 30


def test_a_result_that_is_not_the_next_means_attach_again(ring: type[Ring]) -> None:
    it = ring()
    it.submit("a", 5, max_tokens=30)
    it.steps(4)
    it.world.tell(it.worker.incarnation, StepResult(99, [], 0.0))
    it.finish()
    assert sum(isinstance(o.frame, Attach) for o in it.world.sent) == 2
    assert len(it.output("a").ids) == 30


def test_while_a_worker_is_attached_again_its_sequences_run_in_another_group(ring: type[Ring]) -> None:
    it = ring()
    other = it.world.add_worker()
    it.world.settle()
    it.submit("a", 9, max_tokens=30)
    first, second = (it.worker, other) if it.worker.busy() else (other, it.worker)
    assert not second.busy()
    it.world.tell(first.incarnation, StepResult(99, [], 0.0))
    assert isinstance(second.inbox[0], StepPlan), "at once, before the first one answers"
    it.finish()


def test_out_of_step_before_the_answer_to_attach_changes_nothing(ring: type[Ring]) -> None:
    it = ring()
    it.submit("a", 5, max_tokens=30)
    it.steps(4)
    for _ in range(2):
        it.world.tell(it.worker.incarnation, OutOfStep(1))
    it.finish()
    assert sum(isinstance(o.frame, Attach) for o in it.world.sent) == 2


def test_an_attachment_to_another_scheduler_is_ignored(ring: type[Ring]) -> None:
    world = World(ring().world.shape)
    worker = world.add_worker()
    geometry = Geometry(64, 4, 64, 1000, [], 4, 16)
    world.tell(worker.incarnation, Attached(99, geometry))
    assert world.core.card is None
    world.settle()
    assert world.core.card is not None


def test_a_worker_that_does_not_answer_is_asked_again(ring: type[Ring]) -> None:
    world = World(ring().world.shape)
    worker = world.add_worker()
    worker.inbox.clear()
    world.now += 6.0
    world.turn()
    assert sum(isinstance(o.frame, Attach) for o in world.sent) == 2


def test_an_answer_to_an_earlier_attach_is_ignored(ring: type[Ring]) -> None:
    """It names blocks that were cached before the worker was told to forget them."""
    it = ring()
    world, worker = it.world, it.worker
    world.tell(it.gateway.incarnation, Control("1", ControlVerb.RESET_PREFIX_CACHE))
    assert worker.incarnation not in world.core.groups
    world.tell(worker.incarnation, Attached(1, worker.runner.geometry, [0], b"h" * 16))
    assert worker.incarnation not in world.core.groups, "the answer to a repeated first Attach"
    it.finish()
    assert worker.incarnation in world.core.groups


def test_fenced_ends_the_scheduler(ring: type[Ring]) -> None:
    it = ring()
    with pytest.raises(FencedError, match="another scheduler has taken"):
        it.world.tell(it.worker.incarnation, Fenced())


def test_two_groups_share_the_queue(ring: type[Ring]) -> None:
    it = ring(max_num_seqs=2)
    other = it.world.add_worker()
    it.world.settle()
    for i in range(4):
        it.submit(f"{i}", 5, max_tokens=10)
    for worker in (it.worker, other) * 4:
        it.world.work(worker)
    assert len(it.worker.tables) == len(other.tables) == 2
    it.finish()
