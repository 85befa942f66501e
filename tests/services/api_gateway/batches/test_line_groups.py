"""Lines enter the ring in groups, and none waits while the ring is empty."""

import asyncio
from contextlib import suppress

from blockyard.services.api_gateway.batches.line_groups import LineGroups, LineTurn


class Lines:
    """Lines as tasks, with what entered so far."""

    def __init__(self, size: int) -> None:
        self.groups, self.entered = LineGroups(size), []

    def start(self, name: str) -> tuple[LineTurn, asyncio.Task[None]]:
        turn = self.groups.turn()

        async def line() -> None:
            await turn.enter()
            self.entered.append(name)

        return turn, asyncio.create_task(line())


async def settle() -> None:
    for _ in range(4):
        await asyncio.sleep(0)


async def test_a_group_enters_when_it_is_full() -> None:
    lines = Lines(3)
    first, _ = lines.start("a")
    await settle()
    assert lines.entered == ["a"]  # the ring was empty
    for name in "bcd":
        assert lines.entered == ["a"]
        lines.start(name)
        await settle()
    assert sorted(lines.entered) == ["a", "b", "c", "d"]
    first.leave()


async def test_the_rest_enters_when_the_ring_is_empty() -> None:
    lines = Lines(9)
    first, _ = lines.start("a")
    await settle()
    second, _ = lines.start("b")
    never, cancelled = lines.start("c")
    await settle()
    assert lines.entered == ["a"]
    cancelled.cancel()
    with suppress(asyncio.CancelledError):
        await cancelled
    never.leave()  # it did not enter
    first.leave()
    first.leave()
    await settle()
    assert lines.entered == ["a", "b"]
    third, _ = lines.start("d")
    await settle()
    assert lines.entered == ["a", "b"]  # the second is inside
    second.leave()
    await settle()
    assert lines.entered == ["a", "b", "d"]
    third.leave()


async def test_a_line_that_is_cancelled_when_it_was_let_in_is_not_inside() -> None:
    lines = Lines(2)
    first, _ = lines.start("a")
    await settle()
    _, cancelled = lines.start("b")
    await settle()
    first.leave()  # lets it in
    cancelled.cancel()
    await settle()
    lines.start("c")
    await settle()
    assert lines.entered == ["a", "c"]


async def test_groups_of_one_never_wait() -> None:
    lines = Lines(1)
    for name in "abc":
        lines.start(name)
        await settle()
    assert lines.entered == ["a", "b", "c"]
