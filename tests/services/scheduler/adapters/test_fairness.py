"""Adapters that wait get places, although sequences of others come without an end."""

from hypothesis import given, settings
from hypothesis import strategies as st

from ..harness.world import Shape, World

MAX_WAIT_S = 2.0  # the default of --lora-max-wait
TURN_S = 0.1
OTHERS = 3  # open requests of each adapter that has a place


@settings(max_examples=12, deadline=None)
@given(
    places=st.integers(1, 2),
    num_waiting=st.integers(1, 3),
    more_in_host=st.integers(0, 2),
    workers=st.integers(1, 2),
    policy=st.sampled_from(["fcfs", "fair"]),
    depth=st.sampled_from([0, 1, None]),
)
def test_no_adapter_waits_longer_than_the_rule_allows(
    places: int, num_waiting: int, more_in_host: int, workers: int, policy: str, depth: int | None
) -> None:
    """At first others have all places, of all workers. Each that waits has one after twice its wait, in turn."""
    world = World(
        Shape(
            num_adapter_places=places,
            num_host_adapters=places + more_in_host,
            num_adapters=places + num_waiting,
            max_num_seqs=8,
            max_num_batched_tokens=64,
            num_blocks=200,
            policy=policy,
            depth=depth,
        )
    )
    gateway = world.add_gateway()
    for _ in range(workers):
        world.add_worker()
    detokenizer = world.add_detokenizer()
    world.settle()
    num_others = 0

    def turn() -> None:
        nonlocal num_others
        for name in (f"a{i}" for i in range(places)):
            still_open = [one for one in gateway.journals.values() if one.frame.adapter == name and one.open()]
            for _ in range(OTHERS - len(still_open)):
                num_others += 1
                prompt, tokens = [num_others % 50] * 6, 20 + num_others % 7
                world.submit(gateway, str(num_others), 6, prompt=prompt, adapter=name, max_tokens=tokens)
        for worker in list(world.workers.values()):
            for _ in range(3):
                world.work(worker)
        while detokenizer.inbox:
            world.detokenize(detokenizer)
        world.now += TURN_S
        world.turn()

    for _ in range(10):
        turn()
    waiting = [f"w{i}" for i in range(num_waiting)]
    for i, name in enumerate(waiting):
        world.submit(gateway, name, 7, adapter=f"a{places + i}", max_tokens=4, ignore_eos=True)
    most_s = (num_waiting + 1) * 2 * MAX_WAIT_S
    for _ in range(round(most_s / TURN_S)):
        turn()
        if not any(gateway.journals[name].open() for name in waiting):
            break
    assert not [name for name in waiting if gateway.journals[name].open()], f"after {most_s} s"
    world.settle()
    world.check_outputs()
    world.check_idle()
