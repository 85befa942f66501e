"""One thing at a time through the scheduler core, with the mock batch as its worker."""

import pytest

from blockyard.shared.messages import FinishReason, StepPlan

from .fakes import FakeGateway
from .world import Shape, World


def ring(shape: Shape, **more: object) -> tuple[World, FakeGateway]:
    world = World(shape, **more)
    gateway = world.add_gateway()
    world.add_worker()
    world.add_detokenizer()
    world.settle()
    return world, gateway


def finished(world: World) -> None:
    world.settle()
    world.check_outputs()
    world.check_idle()


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_a_request_runs_to_its_length(depth: int) -> None:
    world, gateway = ring(Shape(depth=depth))
    world.submit(gateway, "a", 5, max_tokens=8)
    finished(world)
    out = gateway.journals["a"].outputs[0]
    assert (len(out.ids), out.finish) == (8, FinishReason.LENGTH)


def plans(world: World) -> list[StepPlan]:
    return [o.frame for o in world.sent if isinstance(o.frame, StepPlan)]
