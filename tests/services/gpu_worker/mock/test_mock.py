"""The mock worker's batch: how it runs plans, and that a plan that contradicts earlier ones is a fatal error."""

import os
import subprocess
import sys
from array import array
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from blockyard.services.gpu_worker.mock import runner as mock_runner
from blockyard.services.gpu_worker.mock.batch import MockBatch, Pattern, PlanError
from blockyard.services.gpu_worker.mock.kv import MockKV, TokensByBlock
from blockyard.services.gpu_worker.mock.model import describe
from blockyard.services.gpu_worker.mock.runner import MockRunner, start
from blockyard.shared.config.services.process import BusConfig, ProcessConfig
from blockyard.shared.config.services.worker import MockConfig, WorkerConfig
from blockyard.shared.errors import LoadError
from blockyard.shared.messages import (
    BlockCopy,
    FinishReason,
    FullBlock,
    Geometry,
    Grammar,
    GrammarKind,
    OutputConstraint,
    Sampling,
    SlotBlocks,
    SlotResult,
    SlotRun,
    SlotStart,
    StepPlan,
)

ROOT = Path(__file__).parents[4]
GEOMETRY = Geometry(8, 4, 20, 1000, [2], 3, 16)
PATTERN = Pattern(100, 900)
PROMPT = [11, 12, 13, 14, 15]


def slot_start(slot: int, blocks: list[int], ids: list[int] = PROMPT, choice: int = 0, **sampling: object) -> SlotStart:
    sampling.setdefault("max_tokens", 4)
    return SlotStart(slot, array("I", ids).tobytes(), len(PROMPT), 0, blocks, Sampling(**sampling), choice)


def found(slot: int, blocks: list[int], num_computed: int, ids: list[int] = PROMPT) -> SlotStart:
    return msgspec.structs.replace(slot_start(slot, blocks, ids), num_computed=num_computed)


def plan(
    *runs: tuple[int, int],
    ends: Sequence[int] = (),
    starts: Sequence[SlotStart] = (),
    blocks: Sequence[SlotBlocks] = (),
    copies: Sequence[BlockCopy] = (),
) -> StepPlan:
    runs_ = [SlotRun(slot, n) for slot, n in runs]
    return StepPlan(1, 1, list(ends), list(starts), list(blocks), runs_, copies=list(copies))


def batch(pattern: Pattern = PATTERN, geometry: Geometry = GEOMETRY) -> MockBatch:
    return MockBatch(geometry, 4, pattern, MockKV(geometry.block_size))


def tokens(it: MockBatch, slot: int, steps: int = 30) -> tuple[list[int], SlotResult | None]:
    """All tokens of a slot until it has no more results, and its last result."""
    ids: list[int] = []
    last = None
    for _ in range(steps):
        results = it.step(plan((slot, 1)))
        if not results:
            break
        last = results[0]
        ids += last.token_ids
    return ids, last


def test_a_chunked_prompt_gives_its_first_token_with_the_last_chunk() -> None:
    it = batch()
    assert it.step(plan((0, 3), starts=[slot_start(0, [0, 1, 2])])) == [SlotResult(0, [], 3)]
    (result,) = it.step(plan((0, 3)))
    assert (result.num_computed, len(result.token_ids)) == (5, 1)


def test_tokens_depend_on_seed_choice_and_position_alone() -> None:
    whole = batch()
    whole.step(plan((0, 5), starts=[slot_start(0, [0, 1, 2], seed=9, max_tokens=5)]))
    first = whole.slots[0]
    ids, _ = tokens(whole, 0)
    ids = [PATTERN.token(first.sampling, 0, 5, first.prompt, []), *ids]
    resumed = batch()
    (result,) = resumed.step(plan((3, 7), starts=[slot_start(3, [5, 1], PROMPT + ids[:2], seed=9, max_tokens=5)]))
    assert result.token_ids == [ids[2]]
    other = batch()
    (result,) = other.step(plan((0, 5), starts=[slot_start(0, [0, 1], choice=1, seed=9)]))
    assert result.token_ids != [ids[0]]


def test_max_tokens_ends_a_slot_and_it_has_no_more_results() -> None:
    it = batch()
    it.step(plan((0, 5), starts=[slot_start(0, [0, 1, 2])]))
    ids, last = tokens(it, 0)
    assert len(ids) == 3
    assert last is not None
    assert last.finish is FinishReason.LENGTH
    assert it.step(plan((0, 1))) == []


def test_the_model_length_ends_a_slot() -> None:
    it = batch()
    it.step(plan((0, 5), starts=[slot_start(0, [0, 1, 2, 3, 4], max_tokens=99)]))
    ids, last = tokens(it, 0)
    assert 1 + len(ids) == GEOMETRY.max_model_len - len(PROMPT)
    assert last is not None
    assert last.finish is FinishReason.LENGTH


@pytest.mark.parametrize("done", [[], [50, 51]])
def test_a_slot_that_has_all_its_tokens_ends_without_one(done: list[int]) -> None:
    it = batch()
    start = slot_start(0, [0, 1, 2], PROMPT + done, max_tokens=len(done))
    assert it.step(plan((0, 7), starts=[start])) == [SlotResult(0, [], 5 + len(done), FinishReason.LENGTH)]


def test_end_of_sequence_and_stop_ids() -> None:
    often = Pattern(100, 101, eos_every=2)

    def run(**sampling: object) -> tuple[list[int], SlotResult | None]:
        it = batch(often)
        it.step(plan((0, 4), starts=[slot_start(0, [0, 1, 2, 3, 4], max_tokens=12, **sampling)]))
        return tokens(it, 0)

    ids, last = run()
    assert ids[-1] == 2
    assert last is not None
    assert (last.finish, last.stop_token) == (FinishReason.STOP, None)
    ids, _ = run(ignore_eos=True)
    assert ids == [100] * 12
    ids, _ = run(min_tokens=6)
    assert 2 not in ids[:6]
    ids, last = run(ignore_eos=True, stop_token_ids=[100])
    assert last is not None
    assert (ids, last.finish, last.stop_token) == ([100], FinishReason.STOP, 100)


def test_echo_repeats_the_prompt() -> None:
    it = batch(Pattern(100, 900, echo=True))
    it.step(plan((0, 4), starts=[slot_start(0, [0, 1, 2], max_tokens=7)]))
    ids, _ = tokens(it, 0)
    assert ids == [11, 12, 13, 14, 15, 11, 12]


def test_logprobs_and_prompt_logprobs_if_asked() -> None:
    it = batch()
    start = slot_start(0, [0, 1, 2], num_logprobs=3, num_prompt_logprobs=1)
    (first,) = it.step(plan((0, 3), starts=[start]))
    (second,) = it.step(plan((0, 2)))
    assert (first.first_prompt, [p.token_id for p in first.prompt_logprobs]) == (1, [12, 13, 14])
    assert (second.first_prompt, [p.token_id for p in second.prompt_logprobs]) == (4, [15])
    assert [(p.token_id, len(p.top_ids)) for p in second.logprobs] == [(second.token_ids[0], 3)]
    plain = batch()
    (result,) = plain.step(plan((0, 5), starts=[slot_start(0, [0, 1, 2])]))
    assert (result.logprobs, result.prompt_logprobs) == ([], [])


BAD = {
    "block 1 of slot 1 is slot 0's": plan((1, 5), starts=[slot_start(1, [1, 2])]),
    "block 1 of slot 0 is slot 0's": plan((0, 1), blocks=[SlotBlocks(0, [1])]),
    "block 8 of 8": plan((1, 5), starts=[slot_start(1, [8, 2])]),
    "start in slot 0, which is live": plan((0, 5), starts=[slot_start(0, [2, 3])]),
    "slot 4 is outside 0 to 3": plan((4, 5), starts=[slot_start(4, [2, 3])]),
    "slot 2 is not live": plan((2, 1)),
    "slot 3 is not live": plan((0, 1), blocks=[SlotBlocks(3, [5])]),
    "end of slot 2, which is not live": plan((0, 1), ends=[2]),
    "slot 1 computes 5 tokens, blocks hold 4": plan((1, 5), starts=[slot_start(1, [2])]),
    "slot 0 runs for 0 tokens": plan((0, 0)),
    "a slot runs twice": plan((0, 1), (0, 1)),
    "17 tokens granted, the limit is 16": plan((0, 17)),
    "4 runs, the limit is 3": plan((0, 1), (1, 1), (2, 1), (3, 1)),
    "slot 1 starts on KV that is not its own at 1": plan((1, 1), starts=[found(1, [0, 2], 4, [11, 9, 13, 14, 15])]),
    "slot 1 starts on KV that is not its own at 0": plan((1, 1), starts=[found(1, [3, 2], 4)]),
    "block 1 is written by a copy and is slot 0's": plan((0, 1), copies=[BlockCopy(0, 1)]),
    "slot 1 starts on KV that is not its own at 3": plan(
        (1, 1), starts=[found(1, [2, 3], 4, [11, 12, 13, 99, 15])], copies=[BlockCopy(0, 2)]
    ),
    "a copy reads what another one writes": plan((0, 1), copies=[BlockCopy(1, 4), BlockCopy(4, 5)]),
    "a block is written by two copies": plan((0, 1), copies=[BlockCopy(0, 4), BlockCopy(1, 4)]),
    "block 0 of slot 1 is slot 0's": plan((1, 5), starts=[slot_start(1, [0, 2])]),
    "21 tokens start, limit 20": plan((1, 1), starts=[slot_start(1, [2], list(range(21)))]),
}


@pytest.mark.parametrize("says", BAD)
def test_contradictions_are_fatal(says: str) -> None:
    it = batch()
    it.step(plan((0, 5), starts=[slot_start(0, [0, 1])]))
    with pytest.raises(PlanError, match=says):
        it.step(BAD[says])


def test_a_copied_block_may_be_written() -> None:
    it = batch()
    it.step(plan((0, 5), starts=[slot_start(0, [0, 1])]))
    (own,) = it.step(plan((1, 5), starts=[slot_start(1, [2, 3], seed=3)]))
    start = msgspec.structs.replace(found(2, [0, 4], 5 - 1), sampling=Sampling(4, seed=3))
    (copied,) = it.step(plan((2, 1), ends=[1], starts=[start], copies=[BlockCopy(1, 4)]))
    assert (copied.num_computed, copied.token_ids) == (5, own.token_ids)


def test_all_copies_read_before_any_writes() -> None:
    """The real pool does so, too: in a chain of copies, each reads the content from before the plan."""
    kv = MockKV(4)
    for block in (0, 1):
        kv.write([block], 0, 4, TokensByBlock(array("I", [block] * 4).tobytes(), 4))
    before = kv.state(1)
    kv.copy([BlockCopy(0, 1), BlockCopy(1, 2)])
    assert (kv.state(1), kv.state(2)) == (kv.state(0), before)
    assert before != kv.state(0)


def test_sequences_with_a_common_prefix_share_blocks() -> None:
    it = batch()
    it.step(plan((0, 5), starts=[slot_start(0, [0, 1])]))
    (own,) = it.step(plan((1, 5), starts=[slot_start(1, [2, 3], seed=3)]))
    (shared,) = it.step(
        plan((2, 1), ends=[1], starts=[msgspec.structs.replace(found(2, [0, 4], 4), sampling=Sampling(4, seed=3))])
    )
    assert (shared.num_computed, shared.token_ids) == (5, own.token_ids)
    it.step(plan((2, 1), ends=[0]))
    with pytest.raises(PlanError, match="block 0 of slot 3 is slot 2's"):
        it.step(plan((3, 5), starts=[slot_start(3, [0, 5])]))


def test_kv_and_block_hashes_outlive_slots() -> None:
    runner = MockRunner(GEOMETRY, PATTERN, step_s=0.0)
    runner.reset(4)
    named = msgspec.structs.replace(plan((0, 5), starts=[slot_start(0, [3, 1])]), full_blocks=[FullBlock(3, b"n" * 16)])
    runner.execute(named)
    runner.reset(4)
    assert runner.block_hashes.blocks_and_hashes() == ([3], b"n" * 16)
    (result,) = runner.execute(plan((0, 1), starts=[found(0, [3, 2], 4)]))
    assert result.num_computed == 5
    runner.execute(plan((1, 5), ends=[0], starts=[slot_start(1, [3, 1], [1, 2, 3, 4, 5])]))
    assert runner.block_hashes.blocks_and_hashes() == ([], b"")


def test_an_ended_slot_and_its_blocks_may_be_reused_in_the_same_plan() -> None:
    it = batch()
    it.step(plan((0, 5), starts=[slot_start(0, [0, 1])]))
    (result,) = it.step(plan((0, 5), ends=[0], starts=[slot_start(0, [1, 0])]))
    assert result.num_computed == 5


def config(folder: Path, **more: object) -> WorkerConfig:
    process = ProcessConfig(name="w", bus=BusConfig(registry="ipc:///d/bus", bind="ipc:///d"))
    return WorkerConfig(process=process, model_path=str(folder), worker_cls="mock", **more)


def test_vocabulary_length_and_eos_ids_come_from_the_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"vocab_size": 4096, "max_position_embeddings": 2048, "eos_token_id": [1, 3], "hidden_size": 8}'
    )
    geometry, pattern = describe(config(tmp_path))
    assert (geometry.vocab_size, geometry.max_model_len, geometry.eos_token_ids) == (4096, 2048, [1, 3])
    assert 0 < pattern.first_id < pattern.end_id < 4096
    geometry, pattern = describe(
        config(
            tmp_path,
            max_model_len=100,
            num_gpu_blocks_override=9,
            mock=MockConfig(vocab_size=50, first_id=10, end_id=20),
        )
    )
    assert (geometry.num_blocks, geometry.max_model_len) == (9, 100)
    assert (pattern.first_id, pattern.end_id) == (10, 20)


def test_bad_models_and_ranges_are_named(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="mock ids 30 to 20"):
        describe(config(tmp_path, mock=MockConfig(vocab_size=50, first_id=30, end_id=20)))
    (tmp_path / "config.json").write_text('{"vocab_size": "many"}')
    with pytest.raises(LoadError, match="vocab_size"):
        describe(config(tmp_path))


class Clock:
    """Virtual time in place of the module `time`."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.now += seconds


@pytest.mark.parametrize(
    ("step_s", "between_s", "total_s"),
    [
        (0.02, 0.0, 0.08),
        (0.02, 0.0015, 0.08),  # a launch that follows at once is timed from the end of the step before
        (0.02, 0.01, 0.11),
        (0.001, 0.0011, 0.0043),  # the next step is due already
    ],
)
def test_a_step_takes_its_time(
    step_s: float, between_s: float, total_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(mock_runner, "time", clock)
    runner = MockRunner(GEOMETRY, PATTERN, step_s)
    runner.reset(4)
    runner.execute(plan((0, 5), starts=[slot_start(0, [0, 1, 2])]))
    for _ in range(3):
        clock.sleep(between_s)
        runner.execute(plan((0, 1)))
    assert clock.now - 100.0 == pytest.approx(total_s)


def test_the_runner_is_ready_with_a_note(tmp_path: Path) -> None:
    notes: list[str] = []
    runner = start(config(tmp_path), lambda phase, progress, more: notes.extend(more))
    assert runner.geometry.num_blocks == MockConfig().num_blocks
    assert "no weights" in notes[0]


def test_a_mock_process_never_loads_torch() -> None:
    code = (
        "import sys, blockyard.services.gpu_worker.__main__, blockyard.services.gpu_worker.mock.runner; "
        "print('torch' in sys.modules, 'numpy' in sys.modules)"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / ".src"), os.environ.get("PYTHONPATH", "")])}
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["False", "False"]


def test_a_choice_with_a_grammar_fails_by_name_beside_one_without() -> None:
    """Its tokens would not be inside the grammar."""
    it = batch()
    grammar = OutputConstraint(Grammar(GrammarKind.REGEX, "a+"))
    guided = slot_start(1, [3, 4], constraint=grammar)
    first, second = it.step(plan((0, 5), (1, 5), starts=[slot_start(0, [0, 1, 2]), guided]))
    assert len(first.token_ids) == 1 and first.finish is None
    assert (second.token_ids, second.finish) == ([], FinishReason.FAILED)
    assert "mock worker makes no masks" in second.detail
    assert [one.slot for one in it.step(plan((0, 1), (1, 1)))] == [0]


def test_a_grammar_is_the_requests_fault_and_not_the_servers() -> None:
    guided = slot_start(0, [3, 4], constraint=OutputConstraint(Grammar(GrammarKind.REGEX, "a+")))
    [result] = batch().step(plan((0, 5), starts=[guided]))
    assert (result.finish, result.status) == (FinishReason.FAILED, 400)


def test_listed_tokens_are_the_candidates() -> None:
    it = batch()
    [result] = it.step(plan((0, 5), starts=[slot_start(0, [3, 4], num_logprobs=0, logprob_token_ids=[9, 5])]))
    [entry] = result.logprobs
    assert entry.top_ids == [9, 5] and len(entry.top_logprobs) == 2 and entry.token_id == result.token_ids[0]
