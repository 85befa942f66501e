"""Requests begin a few at a time, in order, with an iteration of the loop in between."""

import asyncio

from blockyard.services.api_gateway.turns import TURNS, Turns


async def begun_by_iteration(num: int) -> list[int]:
    """How many of `num` requests had begun after each iteration, until all have."""
    turns, begun = Turns(), []

    async def request(number: int) -> None:
        await turns.take()
        begun.append(number)

    tasks = [asyncio.create_task(request(i)) for i in range(num)]
    counts = []
    while len(begun) < num:
        await asyncio.sleep(0)
        counts.append(len(begun))
    await asyncio.gather(*tasks)
    assert begun == list(range(num))
    return counts


async def test_few_requests_begin_in_an_iteration() -> None:
    counts = await begun_by_iteration(50)
    assert all(b - a <= TURNS for a, b in zip([0, *counts], counts, strict=False))
    assert len(counts) <= 50 / TURNS + 3  # and no iteration passes without one


async def test_few_requests_begin_at_once() -> None:
    assert await begun_by_iteration(TURNS) == [TURNS]


async def test_a_request_that_was_cancelled_takes_no_turn() -> None:
    turns = Turns(per_iteration=1)
    await turns.take()
    waiting = [asyncio.create_task(turns.take()) for _ in range(5)]
    await asyncio.sleep(0)
    for task in waiting[:4]:
        task.cancel()
    async with asyncio.timeout(1):
        await waiting[4]
        await asyncio.gather(*waiting, return_exceptions=True)
        await asyncio.sleep(0)
        await turns.take()
