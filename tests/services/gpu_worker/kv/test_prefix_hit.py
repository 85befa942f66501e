"""A slot that starts on cached blocks gives the same tokens as if it had computed them itself, up to ties."""

from pathlib import Path

import pytest
from plan_driver import Driver, as_bytes
from slot_plans import prompt_of
from ties import Score, Ties
from tiny_models import BY_NAME, VOCAB, greedy_score, start

from blockyard.services.gpu_worker.runner import Runner
from blockyard.shared.messages import FinishReason, FullBlock, Sampling, SlotRun, SlotStart, StepPlan

GREEDY = Sampling(max_tokens=30, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Runner, Score]:
    folder: Path = tmp_path_factory.mktemp("tiny")
    theirs = BY_NAME["llama"].save(folder)
    return start(folder, max_model_len=256), greedy_score(theirs)


def plain(runner: Runner, prompt: list[int]) -> list[int]:
    driver = Driver(runner)
    stream = driver.add(prompt, GREEDY)
    driver.run()
    return stream.output


def slot_start(slot: int, prompt: list[int], blocks: list[int], num_computed: int = 0) -> SlotStart:
    return SlotStart(slot, as_bytes(prompt), len(prompt), num_computed, blocks, GREEDY, 0)


def run(runner: Runner, starts: list[SlotStart], chunk: int) -> dict[int, list[int]]:
    """Runs the slots together until they end. Returns the output of each."""
    outputs: dict[int, list[int]] = {s.slot: [] for s in starts}
    live = set(outputs)
    number = 0
    while live:
        number += 1
        runs = [SlotRun(slot, chunk) for slot in sorted(live)]
        for result in runner.execute(StepPlan(1, number, [], starts if number == 1 else [], [], runs)):
            outputs[result.slot] += result.token_ids
            if result.finish is not None:
                assert result.finish is FinishReason.LENGTH
                live.discard(result.slot)
    runner.execute(StepPlan(1, number + 1, list(outputs), [], [], []))
    return outputs


@pytest.mark.parametrize("chunk", [3, 16, 1000])
def test_turns_of_a_conversation_on_shared_blocks(
    tiny: tuple[Runner, Score], chunk: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two second turns at once read prompt and output blocks of the first, beside an unrelated request."""
    runner, score = tiny
    size, ties = runner.geometry.block_size, Ties()
    first, stranger = prompt_of(45, 1), prompt_of(30, 2)
    expected = plain(runner, first)
    runner.reset(8)
    table = [*range(30, 30 + 10)]
    (output,) = run(runner, [slot_start(0, first, table)], chunk).values()
    ties.compare("first turn", first, expected, output, score)
    full = (len(first) + len(output) - 1) // size  # the last token was sampled and never computed
    assert full * size > len(first) + size, "a block of generated tokens alone is among them"
    said = first + output
    turns = [said + prompt_of(9, 3), said[: full * size] + prompt_of(1, 4), stranger]
    expected_turns = [plain(runner, turn) for turn in turns]
    runner.reset(8)  # as when a scheduler attaches: the KV stays
    # `plain` used other blocks, so the first turn is computed again in its own blocks
    run(runner, [slot_start(0, first, table)], chunk)
    starts = [
        slot_start(3, turns[0], [*table[:full], *range(50, 60)], full * size),
        slot_start(1, turns[1], [*table[:full], *range(60, 70)], full * size),
        slot_start(2, turns[2], [*range(70, 80)]),
    ]
    outputs = run(runner, starts, chunk)
    for slot, turn, wanted in zip((3, 1, 2), turns, expected_turns, strict=True):
        ties.compare(f"slot {slot}", turn, wanted, outputs[slot], score)
    with capsys.disabled():
        print(f"\nprefix hits, chunks of {chunk}: {ties.check()}", end="")


def test_blocks_that_are_read_keep_their_hashes(tiny: tuple[Runner, Score]) -> None:
    runner, _ = tiny
    runner.reset(4)
    size = runner.geometry.block_size
    prompt = prompt_of(2 * size + 3, 5)
    names = [FullBlock(5, b"a" * 16), FullBlock(6, b"b" * 16)]
    runner.execute(StepPlan(1, 1, [], [slot_start(0, prompt, [5, 6, 7])], [], [SlotRun(0, 1000)], names))
    runner.execute(StepPlan(1, 2, [0], [slot_start(1, prompt, [5, 6, 8], 2 * size)], [], [SlotRun(1, 1000)]))
    assert {5, 6} <= set(runner.block_hashes.blocks_and_hashes()[0])


def test_block_hashes_of_a_slot_that_could_not_start_are_not_stored(tiny: tuple[Runner, Score]) -> None:
    """Plans sent before the failure was known also contain hashes of its blocks."""
    runner, _ = tiny
    runner.reset(4)
    size = runner.geometry.block_size
    bad = slot_start(0, [*prompt_of(2 * size, 6), VOCAB], [20, 21, 22])
    (result,) = runner.execute(StepPlan(1, 1, [], [bad], [], [SlotRun(0, size)], [FullBlock(20, b"a" * 16)]))
    assert result.finish is FinishReason.FAILED
    runner.execute(StepPlan(1, 2, [], [], [], [SlotRun(0, size)], [FullBlock(21, b"b" * 16)]))
    assert not {20, 21} & set(runner.block_hashes.blocks_and_hashes()[0])
    good = slot_start(1, prompt_of(2 * size + 1, 7), [20, 21, 22])
    names = [FullBlock(20, b"c" * 16), FullBlock(21, b"d" * 16)]
    runner.execute(StepPlan(1, 3, [0], [good], [], [SlotRun(1, 1000)], names))
    assert {20, 21} <= set(runner.block_hashes.blocks_and_hashes()[0])
