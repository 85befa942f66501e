"""Requests whose result is a vector: it goes from a worker through the scheduler to the gateway, past detokenizers."""

from array import array
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from fake_links import FakeLinks

from blockyard.shared.bus.member_list import Gone, Joined
from blockyard.shared.errors import RequestError
from blockyard.shared.messages import (
    ChoiceState,
    FinishReason,
    Frame,
    GatewayIn,
    Generate,
    Member,
    ModelCard,
    Refused,
    Role,
    Sampling,
    SchedulerIn,
    StepResult,
    TextDelta,
    TextOptions,
    VectorBatch,
    VectorResult,
)
from blockyard.shared.ring_client.client import RingClient
from blockyard.shared.ring_client.journal import ChoiceLog, JournalEntry

from .harness.fakes import FakeGateway, Journal, Output, ids_bytes
from .harness.world import FakeWorker, Shape, World

PROMPT = [*range(10, 30)]  # more than a step takes: its prefill has two chunks


def pooled(name: str = "p", attempt: int = 0, num_choices: int = 1) -> Generate:
    choices = [ChoiceState(i) for i in range(num_choices)]
    return Generate(name, attempt, "m", ids_bytes(PROMPT), b"", Sampling(max_tokens=0), None, choices)


def ask(world: World, gateway: FakeGateway, frame: Generate) -> Journal:
    journal = gateway.journals[frame.request_id] = Journal(frame, {0: Output()})
    world.tell(gateway.incarnation, frame)
    return journal


def vectors(gateway: FakeGateway) -> list[VectorResult]:
    return [vector for batch in gateway.vectors for vector in batch.vectors]


@pytest.fixture
def world() -> World:
    return World(Shape(vector_size=3))


def test_a_vector_reaches_its_gateway_without_a_detokenizer(world: World) -> None:
    gateway = world.add_gateway()
    world.add_worker()
    world.settle()
    journal = ask(world, gateway, pooled())
    world.submit(gateway, "text", 4)
    world.settle()
    (vector,) = vectors(gateway)
    assert vector == VectorResult("p", 0, FinishReason.STOP, array("f", [29, 28, 27]).tobytes())
    assert journal.refused is None and journal.detokenizer is None
    assert list(world.core.lifecycle.requests) == ["text"]  # it waits for a detokenizer
    world.add_detokenizer()
    world.settle()
    assert gateway.journals["text"].outputs[0].finish is FinishReason.LENGTH
    world.check_idle()


def test_the_vectors_of_a_step_are_one_frame() -> None:
    world = World(Shape(vector_size=3, max_num_batched_tokens=64))
    gateway = world.add_gateway()
    for name in ("a", "b", "c"):
        ask(world, gateway, pooled(name))
    world.add_worker()
    world.settle()
    assert len(vectors(gateway)) == 3 > len(gateway.vectors)  # the first may be in a step of its own
    world.check_idle()


def test_it_survives_its_worker_and_a_new_attempt(world: World) -> None:
    gateway, worker = world.add_gateway(), world.add_worker()
    ask(world, gateway, pooled())
    world.work(worker)
    world.kill(worker.incarnation)
    ask(world, gateway, pooled(attempt=1))
    world.add_worker()
    world.settle()
    assert [(vector.attempt, vector.finish) for vector in vectors(gateway)] == [(1, FinishReason.STOP)]
    world.check_idle()


@pytest.mark.parametrize("num_choices", [0, 2])
def test_it_has_one_choice(world: World, num_choices: int) -> None:
    gateway = world.add_gateway()
    world.add_worker()
    world.settle()
    refused = ask(world, gateway, pooled(num_choices=num_choices)).refused
    assert isinstance(refused, Refused) and (refused.status, refused.field) == (400, "n")


def test_a_model_that_makes_no_vectors_refuses_it() -> None:
    world = World(Shape())
    gateway = world.add_gateway()
    world.add_worker()
    world.settle()
    refused = ask(world, gateway, pooled()).refused
    assert refused is not None and (refused.status, refused.field) == (400, "model")
    assert refused.message == "the model 'm' makes no vectors"


def test_a_worker_that_samples_instead_fails_the_request(world: World) -> None:
    gateway, worker = world.add_gateway(), world.add_worker()
    world.settle()
    ask(world, gateway, pooled())
    _samples(world, worker)
    (vector,) = vectors(gateway)
    assert (vector.finish, vector.data, vector.status) == (FinishReason.FAILED, b"", 500)
    assert "sampled tokens" in vector.detail
    world.check_idle()


def _samples(world: World, worker: FakeWorker) -> None:
    """The worker answers with a token where it should answer with a vector."""
    while worker.busy():
        for answer in worker.work():
            world.core.on_message(worker.incarnation, _sampled(answer), world.now)
            world.turn()


def _sampled(answer: Frame) -> Frame:
    if not isinstance(answer, StepResult):
        return answer
    sampled = [
        msgspec.structs.replace(s, vector=b"", token_ids=[5], finish=None) if s.vector else s for s in answer.slots
    ]
    return msgspec.structs.replace(answer, slots=sampled)


def test_requests_with_text_are_as_before(world: World) -> None:
    gateway = world.add_gateway()
    world.add_worker()
    world.add_detokenizer()
    assert world.submit(gateway, "r", 5).text == TextOptions()
    world.settle()
    world.check_outputs()
    assert vectors(gateway) == []


class NoText:
    """A sink."""

    def push(self, delta: TextDelta, now: float, stamp_s: float) -> None:
        raise AssertionError("there is no text")


@dataclass
class Caller:
    """The owner of a request."""

    vectors: list[bytes] = field(default_factory=list)
    errors: list[RequestError] = field(default_factory=list)
    num_accepted: int = 0

    def accepted(self, entry: JournalEntry) -> None:
        self.num_accepted += 1

    def begun(self, entry: JournalEntry) -> None:
        raise AssertionError("there is no output")

    def finished(self, entry: JournalEntry) -> None:
        self.vectors.append(entry.vector)

    def failed(self, entry: JournalEntry, error: RequestError) -> None:
        self.errors.append(error)


class ClientWorld:
    """A ring client before a scheduler; frames between them pass as bytes."""

    def __init__(self, world: World, scheduler: int = 900) -> None:
        self.world, self.scheduler, self.caller = world, scheduler, Caller()
        me = world.add_gateway().incarnation
        world.settle()
        self.links = FakeLinks(Member("api_gateway", Role.API_GATEWAY, me, "ipc:///1"))
        self.client = RingClient(self.links, [], 60.0, clock=lambda: 1.0)
        self.join()

    def join(self) -> None:
        member = Member("scheduler", Role.SCHEDULER, self.scheduler, "", ready=True, card=self.world.core.card)
        self.links.members[self.scheduler] = member
        self.client.handle(self.scheduler, Joined(member))

    def ask(self, request: Generate) -> None:
        self.client.dispatch.open(JournalEntry(request, [ChoiceLog(0, NoText())], self.caller, 1.0), 1.0)

    def pass_on(self) -> None:
        """To the scheduler, and back what it has answered after that."""
        me, sent = self.links.me.incarnation, len(self.world.sent)
        for _, frame in self.links.sent:
            self.world.core.on_message(me, decode(frame, SchedulerIn), self.world.now)
        self.links.sent.clear()
        self.world.gateways.pop(me, None)  # its frames are read here
        self.world.turn()
        self.world.settle()
        for outgoing in self.world.sent[sent:]:
            if outgoing.to == me:
                self.client.handle(self.scheduler, decode(outgoing.frame, GatewayIn))


def decode(frame: Frame, union: Any) -> Any:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(frame), type=union)


def test_a_client_gets_its_vector(world: World) -> None:
    world.add_worker()
    ring = ClientWorld(world)
    ring.ask(pooled())
    ring.pass_on()
    assert ring.caller == Caller([array("f", [29, 28, 27]).tobytes()], num_accepted=1)
    assert (ring.client.num_open(), ring.client.meters.ended[FinishReason.STOP]) == (0, 1)
    assert ring.client.meters.prompt_tokens == len(PROMPT)


def test_a_client_hears_of_a_failure(world: World) -> None:
    ring = ClientWorld(world)
    ring.join()
    member = Member("scheduler", Role.SCHEDULER, 900, "", ready=True, card=ModelCard(["m"], "m", 64, 100, 0))
    ring.client.handle(900, Joined(member))
    ring.ask(pooled())
    late = VectorResult("p", 3, FinishReason.STOP, b"1234")  # of no attempt
    failed = VectorResult("p", 0, FinishReason.FAILED, detail="it broke", status=422)
    ring.client.handle(900, VectorBatch([late, failed, failed]))
    (error,) = ring.caller.errors
    assert (str(error), error.status, ring.caller.vectors) == ("it broke", 422, [])
    assert ring.client.meters.ended[FinishReason.FAILED] == 1


def test_a_client_asks_again_once_its_scheduler_is_lost(world: World) -> None:
    world.add_worker()
    ring = ClientWorld(world)
    ring.ask(pooled())
    ring.links.sent.clear()  # the frame is lost with its scheduler
    ring.client.handle(900, Gone(ring.links.members.pop(900)))
    ring.join()
    (again,) = [frame for _, frame in ring.links.sent if isinstance(frame, Generate)]
    assert again.attempt > 0
    ring.pass_on()
    assert len(ring.caller.vectors) == 1
