"""Requests for vectors of many prompts: from a gateway to the steps of workers, and back in one frame a step."""

from array import array

import msgspec
import pytest

from blockyard.services.scheduler.queue import queue_bounds
from blockyard.shared.messages import (
    Accepted,
    Cancel,
    ChoiceState,
    Control,
    ControlVerb,
    Frame,
    Generate,
    PoolingParams,
    Sampling,
    StepPlan,
    StepResult,
    TextOptions,
)

from .harness.fake_pools import pool_frame, vector_of
from .harness.fakes import FakeGateway, ids_bytes
from .harness.world import FakeWorker, Shape, World

LONG = [*range(10, 40)]  # more than a step of a decoder takes
PROMPTS = [[5], LONG, [6, 7, 8], [*range(20, 32)]]
KINDS = ["encoder", "last", "mean"]


@pytest.fixture(params=KINDS)
def world(request: pytest.FixtureRequest) -> World:
    return World(Shape(pooling=request.param))


def ready(world: World) -> tuple[FakeGateway, FakeWorker]:
    gateway, worker = world.add_gateway(), world.add_worker()
    world.settle()
    return gateway, worker


def plans(world: World) -> list[StepPlan]:
    return [outgoing.frame for outgoing in world.sent if isinstance(outgoing.frame, StepPlan)]


def packed_lengths(world: World) -> list[list[int]]:
    """Tokens of the texts of each plan."""
    return [array("I", plan.packed.lengths).tolist() for plan in plans(world) if plan.packed is not None]


def test_vectors_reach_their_gateway_without_a_detokenizer(world: World) -> None:
    gateway, _ = ready(world)
    journal = world.pool(gateway, "p", PROMPTS)
    world.settle()
    assert journal.results == {i: vector_of(prompt) for i, prompt in enumerate(PROMPTS)}
    assert journal.num_accepted == 1
    world.check_idle()


def test_the_vectors_of_a_step_are_one_frame_with_a_block_for_each_request() -> None:
    world = World(Shape(pooling="encoder", max_num_batched_tokens=64))
    gateway = world.add_gateway()
    for name in ("a", "b", "c"):
        world.pool(gateway, name, [[1, 2], [3]])
    world.add_worker()
    world.settle()
    (batch,) = gateway.vectors
    assert [(block.request_id, block.indexes) for block in batch.blocks] == [
        (name, array("I", [0, 1]).tobytes()) for name in ("a", "b", "c")
    ]
    world.check_idle()


def test_an_encoder_step_is_full_and_texts_stay_whole() -> None:
    world = World(Shape(pooling="encoder", max_num_batched_tokens=16, max_model_len=16, max_num_seqs=2))
    gateway = world.add_gateway()
    lengths = [4, 4, 4, 4, 16, 1, 9, 7]
    world.pool(gateway, "p", [[*range(n)] for n in lengths])
    world.add_worker()
    world.settle()
    assert packed_lengths(world) == [[4, 4, 4, 4], [16], [1, 9], [7]]
    assert not any(plan.starts or plan.runs for plan in plans(world))


def test_priorities_order_the_texts_of_an_encoder() -> None:
    world = World(Shape(pooling="encoder", max_num_batched_tokens=16, max_model_len=16, policy="priority"))
    gateway = world.add_gateway()
    world.pool(gateway, "late", [[*range(16)]] * 2, priority=1)
    world.pool(gateway, "first", [[*range(16)]] * 2, priority=0)
    world.add_worker()
    world.settle()
    names = [block.request_id for batch in gateway.vectors for block in batch.blocks]
    assert names == ["first", "first", "late", "late"]


def test_only_last_starts_behind_a_cached_prefix() -> None:
    for kind, computed in (("last", [0, 28]), ("mean", [0, 0])):
        world = World(Shape(pooling=kind, max_num_batched_tokens=64))
        gateway, _ = ready(world)
        for name in ("a", "b"):
            world.pool(gateway, name, [LONG])
            world.settle()
        assert [start.num_computed for plan in plans(world) for start in plan.starts] == computed
        (cached,) = {block.cached_tokens for block in gateway.vectors[-1].blocks}
        assert array("I", cached).tolist() == [one for one in computed[1:] if one]
        world.pool(gateway, "c", [LONG], params=PoolingParams(pooling_type="last" if kind == "mean" else "Mean"))
        world.settle()
        assert plans(world)[-1].starts[0].num_computed == (28 if kind == "mean" else 0)


def test_it_survives_its_worker_and_a_new_attempt_asks_for_what_is_missing(world: World) -> None:
    gateway, worker = ready(world)
    journal = world.pool(gateway, "p", PROMPTS * 4)
    while not journal.results:
        world.work(worker)
    had = set(journal.results)
    world.kill(worker.incarnation)
    world.tell(gateway.incarnation, journal.again())
    world.add_worker()
    world.settle()
    assert journal.results.keys() == {*range(16)} and len(had) < 16
    assert not {index for attempt, index in journal.seen if attempt == 1} & had
    world.check_idle()


def test_texts_that_run_go_on_in_a_new_attempt() -> None:
    world = World(Shape(pooling="encoder", depth=0))
    gateway, _ = ready(world)
    journal = world.pool(gateway, "p", PROMPTS)
    num_started = sum(map(len, packed_lengths(world)))
    world.tell(gateway.incarnation, journal.again())
    world.settle()
    assert num_started and sum(map(len, packed_lengths(world))) == len(PROMPTS)
    assert {attempt for attempt, _ in journal.seen} == {1}
    world.check_outputs()


def test_a_cancel_drops_what_waits_and_what_runs(world: World) -> None:
    gateway, worker = ready(world)
    journal = world.pool(gateway, "p", PROMPTS * 4)
    world.work(worker)
    journal.cancelled = True
    world.tell(gateway.incarnation, Cancel("p", 0))
    assert not world.lifecycle.requests
    world.settle()
    world.check_idle()


def test_the_bounds_of_the_queue_count_calls_and_tokens() -> None:
    for shape in (Shape(pooling="encoder", max_queue_len=1), Shape(pooling="encoder", max_queue_tokens=40)):
        world = World(shape)
        gateway = world.add_gateway()
        first = world.pool(gateway, "first", PROMPTS, tenant="a")  # an empty queue takes any
        refused = world.pool(gateway, "second", [LONG], tenant="a").refused
        assert refused is not None and refused.status == 429
        other = world.pool(gateway, "third", [[1]], tenant="b")  # all texts of the larger tenant's newest one give way
        assert first.refused is not None and first.refused.status == 429 and other.refused is None
        world.add_worker()
        world.settle()
        world.check_outputs()
        world.check_idle()


def test_a_call_in_parts_is_taken_or_refused_as_a_whole() -> None:
    world = World(Shape(pooling="encoder", max_queue_len=1, max_queue_tokens=2**22))
    gateway = world.add_gateway()
    first = world.pool(gateway, "call", [[1, 2]], later_prompts=2, later_tokens=4)
    parts = [world.pool(gateway, f"call-part{i}", [[3]], is_later=True) for i in (1, 2)]
    world.settle()
    assert [call.num_accepted for call in (first, *parts)] == [0, 1, 1], "they are in the ring already"
    assert world.core.waiting.usage.amount == (3, 4, 1)
    other = world.pool(gateway, "other", [[1]]).refused
    assert other is not None and other.status == 429
    world.add_worker()
    world.settle()
    world.check_outputs()
    world.check_idle()
    for shape in (Shape(pooling="encoder", max_queue_tokens=10), Shape(pooling="", max_queue_tokens=10)):
        world = World(shape)
        gateway = world.add_gateway()
        world.pool(gateway, "before", [[1, 2, 3]])
        fits = world.pool(gateway, "fits", [[1]], later_prompts=3, later_tokens=3)
        too_much = world.pool(gateway, "too much", [[1]], later_prompts=6, later_tokens=6)
        assert fits.refused is None and too_much.refused is not None


def test_calls_of_many_texts_wait_side_by_side() -> None:
    world = World(Shape(pooling="encoder", max_queue_len=4, max_queue_tokens=2**22, max_num_batched_tokens=4096))
    gateway = world.add_gateway()
    calls = [world.pool(gateway, str(i), [[1, 2, 3]] * 2048) for i in range(4)]
    assert world.core.waiting.usage.amount == (4 * 2048, 4 * 2048 * 3, 4)
    assert world.core.bounds.capacity().choices == 0
    fifth = world.pool(gateway, "5", [[1]])
    assert fifth.refused is not None and fifth.refused.status == 429
    world.add_worker()
    world.settle()
    assert all(call.refused is None for call in calls)
    world.check_outputs()
    world.check_idle()


def test_prompts_of_calls_are_bounded_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_bounds, "MAX_PROMPTS", 10)
    world = World(Shape(pooling="encoder", max_queue_len=4))
    gateway = world.add_gateway()
    first = world.pool(gateway, "first", [[1]] * 20, tenant="a")  # alone it may have any number
    refused = world.pool(gateway, "second", [[1]], tenant="a").refused
    assert refused is not None and refused.status == 429
    other = world.pool(gateway, "third", [[1]] * 10, tenant="b")
    assert first.refused is not None and other.refused is None
    assert world.core.bounds.capacity().choices == 0
    world.add_worker()
    world.settle()
    world.check_idle()


def test_texts_wait_while_the_workers_sleep_and_a_full_queue_is_a_503() -> None:
    world = World(Shape(pooling="encoder", max_queue_len=2))
    gateway, _ = ready(world)
    world.tell(gateway.incarnation, Control("sleep", ControlVerb.SLEEP, level=1))
    world.settle()
    calls = [world.pool(gateway, str(i), PROMPTS) for i in range(3)]
    world.settle()
    assert not any(call.results for call in calls)
    refused = calls[2].refused
    assert refused is not None and (refused.status, refused.capacity.asleep) == (503, True)
    world.tell(gateway.incarnation, Control("wake", ControlVerb.WAKE_UP))
    world.settle()
    assert all(len(call.results) == len(PROMPTS) for call in calls[:2])
    world.check_outputs()
    world.check_idle()


def test_it_is_accepted_once_for_all_texts_after_a_while() -> None:
    world = World(Shape(pooling="encoder"))
    gateway = world.add_gateway()
    journal = world.pool(gateway, "p", PROMPTS)
    world.now += 6
    world.turn()
    assert journal.num_accepted == 1
    world.tell(gateway.incarnation, journal.frame)
    assert journal.num_accepted == 2, "a repeated frame gets a repeated answer"
    world.add_worker()
    world.settle()
    assert len([out for out in world.sent if isinstance(out.frame, Accepted)]) == 2
    world.check_outputs()


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"model": "other"}, "model"),
        ({"indexes": b""}, "input"),
        ({"indexes": array("I", [0, 0, 1, 2]).tobytes()}, "input"),
        ({"token_ids": b"\0\0\0\0"}, "input"),
        ({"second_starts": b"\0\0\0\0"}, "input"),
        ({"token_ids": array("I", [1000] * 46).tobytes()}, "input"),
        ({"lengths": array("I", [1, 30, 0, 15]).tobytes()}, "input[2]"),
        ({"lengths": array("I", [1, 30, 15, 0]).tobytes()}, "input[3]"),
    ],
)
def test_what_is_refused(change: dict[str, object], field: str) -> None:
    world = World(Shape(pooling="encoder"))
    gateway, _ = ready(world)
    journal = world.pool(gateway, "p", PROMPTS)
    world.settle()
    journal.results.clear()
    frame = msgspec.structs.replace(pool_frame("q", dict(enumerate(PROMPTS))), **change)
    journal.frame = frame
    gateway.pools["q"] = journal
    journal.num_accepted = 0
    world.tell(gateway.incarnation, frame)
    assert journal.refused is not None and journal.refused.field == field, journal.refused


def test_a_pooling_model_generates_no_text_and_another_makes_no_vectors(world: World) -> None:
    gateway, _ = ready(world)
    world.submit(gateway, "text", 4)
    refused = gateway.journals["text"].refused
    assert refused is not None and refused.message == "the model 'm' serves embed, and generates no text"
    other = World(Shape())
    gateway, _ = ready(other)
    refused = other.pool(gateway, "p", PROMPTS).refused
    assert refused is not None and refused.message == "the model 'm' generates text, and makes no vectors"


def test_a_request_without_text_is_refused() -> None:
    world = World(Shape())
    gateway, _ = ready(world)
    world.submit(gateway, "r", 4)
    frame = Generate("s", 0, "m", ids_bytes([1]), b"", Sampling(1), None, [ChoiceState(0)])
    gateway.journals["s"] = gateway.journals["r"]
    gateway.journals["s"].refused = None
    world.tell(gateway.incarnation, frame)
    assert gateway.journals["s"].refused is not None


def test_a_worker_that_samples_instead_fails_the_text() -> None:
    world = World(Shape(pooling="mean"))
    gateway, worker = ready(world)
    journal = world.pool(gateway, "p", [[1, 2]])
    while worker.busy():
        for answer in worker.work():
            world.core.on_message(worker.incarnation, _sampled(answer), world.now)
            world.turn()
    assert "sampled tokens" in journal.failures[0]
    world.check_idle()


def _sampled(answer: Frame) -> Frame:
    if not isinstance(answer, StepResult):
        return answer
    sampled = [
        msgspec.structs.replace(s, vector=b"", token_ids=[5], finish=None) if s.vector else s for s in answer.slots
    ]
    return msgspec.structs.replace(answer, slots=sampled)


def test_several_encoders_share_the_texts() -> None:
    world = World(Shape(pooling="encoder", max_num_batched_tokens=16, max_model_len=16))
    gateway = world.add_gateway()
    workers = [world.add_worker(), world.add_worker()]
    world.settle()
    world.pool(gateway, "p", [[*range(16)]] * 6)
    world.settle()
    sent = [outgoing.to for outgoing in world.sent if isinstance(outgoing.frame, StepPlan)]
    assert {sent.count(worker.incarnation) for worker in workers} == {3}
    world.check_outputs()
    world.check_idle()


def test_requests_for_text_are_as_before() -> None:
    world = World(Shape())
    gateway, _ = ready(world)
    world.add_detokenizer()
    assert world.submit(gateway, "r", 5).text == TextOptions()
    world.settle()
    world.check_outputs()
    assert not gateway.vectors
