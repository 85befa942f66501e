"""Beam searches with beams in several groups: none waits for an idle one in a group to which nothing happens."""

import pytest

from blockyard.shared.messages import Beam

from .pair import D, P, Pair


def num_held_up(it: Pair) -> int:
    """Searches with no result to come, of which a beam waits and an idle one has blocks in another group than it had.

    A beam is idle when it runs and has nothing to compute before the others have done so.
    """
    count = 0
    for request in it.world.lifecycle.requests.values():
        beams = request.search.beams if request.search is not None else []
        waiting = {beam.last_run.worker for beam in beams if beam.ticket and beam.last_run is not None}
        computed = {beam for beam in beams if beam.hypothesis is not None and beam.hypothesis.top is not None}
        groups = it.world.core.groups.values()
        idle = {running.worker for group in groups for running in group.running if running.sequence in computed}
        count += bool(waiting and idle - waiting) and not any(beam.awaits_results() for beam in beams)
    return count


@pytest.mark.parametrize(
    ("depth", "max_num_batched_tokens", "decode_prefill_tokens", "searches"),
    [
        (0, 4, 8, [(7, 4, 10), (8, 4, 14)]),
        (1, 20, 4, [(8, 4, 12), (11, 2, 8)]),
    ],
)
def test_beams_whose_blocks_cannot_be_fetched(
    monkeypatch: pytest.MonkeyPatch,
    depth: int,
    max_num_batched_tokens: int,
    decode_prefill_tokens: int,
    searches: list[tuple[int, int, int]],  # tokens of the prompt, beams, and tokens at most
) -> None:
    """A beam ran in one group and waits for the other, where an idle beam has all blocks: that one is preempted.

    Time stands still here, so that groups get plans only after something has happened to them.
    """
    it = Pair(
        *(P, D, D),
        num_blocks=5,
        num_host_blocks=40,
        max_num_seqs=6,
        failing=True,
        depth=depth,
        max_num_batched_tokens=max_num_batched_tokens,
        decode_prefill_tokens=decode_prefill_tokens,
    )
    turn, held_up = it.world.turn, list[int]()

    def counted_turn() -> None:
        held_up.append(num_held_up(it))
        turn()

    monkeypatch.setattr(it.world, "turn", counted_turn)
    for i, (num_prompt, width, max_tokens) in enumerate(searches):
        it.submit(str(i), num_prompt, max_tokens=max_tokens, beam=Beam(width), temperature=0.0)
    it.finish()
    assert it.world.now == 0.0
    assert any(held_up)
