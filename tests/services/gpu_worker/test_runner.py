"""Step plans on a tiny model: which tokens slots produce and when they end, independent of other slots.

On the CPU, and with the steps of a GPU in host memory.
"""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_driver import Driver, Stream, as_bytes
from reference_ops import run_ahead
from slot_plans import prompt_of, started
from ties import Score, Ties
from tiny_models import BY_NAME, VOCAB, greedy_score, start
from torch import Tensor
from transformers import PreTrainedModel

from blockyard.kernels.sampling.philox_gumbel import gumbel_rows, split_seed
from blockyard.services.gpu_worker.runner import Runner
from blockyard.shared.messages import (
    FinishReason,
    FullBlock,
    Sampling,
    SlotBlocks,
    SlotRun,
    SlotStart,
    StepPlan,
)

EOS = 1


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Path]:
    folder = tmp_path_factory.mktemp("tiny")
    return BY_NAME["llama"].save(folder), folder


@pytest.fixture(scope="module")
def theirs(tiny: tuple[PreTrainedModel, Path]) -> PreTrainedModel:
    return tiny[0]


@pytest.fixture(scope="module")
def logits_of(theirs: PreTrainedModel) -> Score:
    return greedy_score(theirs)


@pytest.fixture(scope="module", params=["cpu", "gpu"])
def runner(tiny: tuple[PreTrainedModel, Path], request: pytest.FixtureRequest) -> Runner:
    runner = start(tiny[1], max_model_len=128)
    if request.param == "gpu":
        run_ahead(runner, capacity=32)
    return runner


def greedy(**fields: Any) -> Sampling:
    return Sampling(**({"max_tokens": 20, "temperature": 0.0, "ignore_eos": True} | fields))


def generate(runner: Runner, prompt: list[int], sampling: Sampling, **options: Any) -> Stream:
    driver = Driver(runner, **options)
    stream = driver.add(prompt, sampling)
    driver.run()
    return stream


# --- the same tokens, however they are computed -----------------------------------------------------------------------

STREAMS: list[tuple[list[int], Sampling, int]] = [
    (prompt_of(9, 1), Sampling(max_tokens=40, temperature=1.0, seed=7, ignore_eos=True), 0),
    (prompt_of(9, 1), Sampling(max_tokens=40, temperature=1.0, seed=7, ignore_eos=True), 1),
    (prompt_of(30, 2), Sampling(max_tokens=30, temperature=0.6, top_p=0.9, seed=2**63 + 5, ignore_eos=True), 0),
    (prompt_of(17, 3), Sampling(max_tokens=40, temperature=2.0, top_k=100, seed=3, ignore_eos=True), 0),
    (
        prompt_of(5, 4),
        Sampling(
            max_tokens=30,
            temperature=0.8,
            min_p=0.02,
            repetition_penalty=1.2,
            presence_penalty=0.5,
            frequency_penalty=0.3,
            seed=9,
            min_tokens=25,
        ),
        0,
    ),
    (prompt_of(44, 5), greedy(max_tokens=35, bad_words=[[5], [60, 61]], logit_bias=[(8, 3.0)]), 0),
]


def seeded_score(logits_of: Score, sampling: Sampling, choice: int) -> Score:
    """float64 scores with noise, for streams without limits and penalties."""
    key = torch.tensor([split_seed(sampling.seed)]).T

    def score(ids: list[int]) -> Tensor:
        noise = gumbel_rows(key, torch.tensor([len(ids)]), torch.tensor([choice]), VOCAB)[0]
        return logits_of(ids) / sampling.temperature + noise.double()

    return score


@pytest.fixture(scope="module")
def alone(runner: Runner) -> list[list[int]]:
    outputs = []
    for prompt, sampling, choice in STREAMS:
        driver = Driver(runner)
        stream = driver.add(prompt, sampling, choice)
        driver.run()
        outputs.append(stream.output)
    return outputs


def test_choices_and_seeds_give_different_texts(alone: list[list[int]]) -> None:
    assert alone[0] != alone[1]
    assert all(len(set(output)) > 5 for output in alone)


def test_a_seeded_draw_is_the_documented_one(logits_of: Score, alone: list[list[int]]) -> None:
    prompt, sampling, choice = STREAMS[1]
    score = seeded_score(logits_of, sampling, choice)
    expected: list[int] = []
    for _ in range(len(alone[1])):
        expected.append(int(score(prompt + expected).argmax()))
    ties = Ties()
    ties.compare("seeded", prompt, expected, alone[1], score)
    ties.check()


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    depth=st.integers(0, 3),
    chunk=st.sampled_from([1, 3, 8, 13, 1000]),
    num_slots=st.integers(1, 8),
    preempt=st.lists(st.lists(st.integers(1, 39), max_size=3), min_size=len(STREAMS), max_size=len(STREAMS)),
    seed=st.integers(0, 99),
)
def test_batched_chunked_preempted_and_ahead_equal_alone(
    runner: Runner,
    logits_of: Score,
    alone: list[list[int]],
    depth: int,
    chunk: int,
    num_slots: int,
    preempt: list[list[int]],
    seed: int,
) -> None:
    driver = Driver(runner, num_slots=num_slots, depth=depth, chunk=chunk, seed=seed)
    streams = [driver.add(*s, preempt_at=tuple(preempt[i])) for i, s in enumerate(STREAMS)]
    driver.run()
    ties = Ties()
    for i, stream in enumerate(streams):
        score = seeded_score(logits_of, stream.sampling, stream.choice) if i < 2 else logits_of
        ties.compare(f"stream {i}", stream.prompt, alone[i], stream.output, score)
    ties.check()
    assert len(driver.free_blocks) == runner.geometry.num_blocks


def test_more_rows_than_are_sampled_at_once(
    runner: Runner, alone: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("blockyard.services.gpu_worker.execution.cpu_steps.MOST_SAMPLED", 2)
    driver = Driver(runner)
    streams = [driver.add(*one) for one in STREAMS]
    driver.run()
    assert [stream.output for stream in streams] == alone


# --- how a choice ends ------------------------------------------------------------------------------------------------


def test_max_tokens(runner: Runner) -> None:
    stream = generate(runner, prompt_of(5), greedy(max_tokens=3))
    assert (len(stream.output), stream.finish, stream.stop_token) == (3, FinishReason.LENGTH, None)


def test_max_tokens_of_zero(runner: Runner) -> None:
    stream = generate(runner, prompt_of(5), greedy(max_tokens=0, num_prompt_logprobs=1), chunk=2)
    assert (stream.output, stream.finish) == ([], FinishReason.LENGTH)
    assert sorted(stream.prompt_logprobs) == [1, 2, 3, 4]


def test_the_context_ends(runner: Runner) -> None:
    stream = generate(runner, prompt_of(120), greedy(max_tokens=50))
    assert (len(stream.output), stream.finish) == (8, FinishReason.LENGTH)
    stream = generate(runner, prompt_of(128), greedy(max_tokens=50))
    assert (len(stream.output), stream.finish) == (0, FinishReason.LENGTH)


def test_end_of_sequence_and_stop_ids(runner: Runner) -> None:
    free = generate(runner, prompt_of(6), greedy(logit_bias=[(EOS, -100.0)]))
    fourth = free.output[3]
    first = free.output.index(fourth)
    stopped = generate(runner, prompt_of(6), greedy(logit_bias=[(EOS, -100.0)], stop_token_ids=[fourth]))
    assert stopped.output == free.output[: first + 1]
    assert (stopped.finish, stopped.stop_token) == (FinishReason.STOP, fourth)
    forced = [(EOS, 1000.0)]
    ended = generate(runner, prompt_of(6), greedy(logit_bias=forced, ignore_eos=False))
    assert (ended.output, ended.finish, ended.stop_token) == ([EOS], FinishReason.STOP, None)
    going = generate(runner, prompt_of(6), greedy(logit_bias=forced, max_tokens=4))
    assert (going.output, going.finish) == ([EOS] * 4, FinishReason.LENGTH)
    late = generate(runner, prompt_of(6), greedy(logit_bias=forced, ignore_eos=False, min_tokens=3))
    assert EOS not in late.output[:3]
    assert (late.output[3:], late.finish) == ([EOS], FinishReason.STOP)


def test_an_ended_slot_is_silent_and_writes_nothing(runner: Runner) -> None:
    runner.reset(4)
    prompt = prompt_of(7)
    plan = StepPlan(1, 1, [], [started(2, prompt, greedy(max_tokens=1), [4, 5])], [], [SlotRun(2, 7)])
    (result,) = runner.execute(plan)
    assert (result.finish, result.num_computed) == (FinishReason.LENGTH, 7)
    before = runner.pool.runs[0].clone()
    assert runner.execute(StepPlan(1, 2, [], [], [], [SlotRun(2, 1)])) == []  # scheduled before its end was known
    assert torch.equal(before, runner.pool.runs[0])
    assert runner.execute(StepPlan(1, 3, [2], [], [], [])) == []


def test_scheduled_tokens_beyond_the_blocks_are_cut(runner: Runner) -> None:
    runner.reset(4)
    (result,) = runner.execute(StepPlan(1, 1, [], [started(0, prompt_of(20), greedy(), [9])], [], [SlotRun(0, 20)]))
    assert (result.token_ids, result.num_computed) == ([], 8)
    plan = StepPlan(1, 2, [], [], [SlotBlocks(0, [3, 7])], [SlotRun(0, 20)])
    (result,) = runner.execute(plan)
    assert (len(result.token_ids), result.num_computed) == (1, 20)


def test_a_cached_prefix(runner: Runner) -> None:
    prompt = prompt_of(20)
    runner.reset(4)
    first = started(0, prompt, greedy(max_tokens=1), [11, 12, 13])
    (whole,) = runner.execute(StepPlan(1, 1, [], [first], [], [SlotRun(0, 20)]))
    shared = started(1, prompt, greedy(max_tokens=1), [11, 12, 14], computed=16)
    (part,) = runner.execute(StepPlan(1, 2, [0], [shared], [], [SlotRun(1, 20)]))
    assert (part.token_ids, part.num_computed) == (whole.token_ids, 20)


# --- one slot's failure is its own ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "detail"),
    [
        (SlotStart(1, as_bytes([3, VOCAB]), 2, 0, [5], greedy(), 0), "token id 211"),
        (SlotStart(1, as_bytes([]), 0, 0, [5], greedy(), 0), "0 tokens"),
        (SlotStart(1, as_bytes([3] * 129), 129, 0, [5], greedy(), 0), "129 tokens"),
        (SlotStart(1, as_bytes([3, 4]), 2, 2, [5], greedy(), 0), "computed already"),
        (SlotStart(1, as_bytes([3, 4]), 3, 0, [5], greedy(), 0), "be the prompt"),
        (SlotStart(1, as_bytes([3, 4]), 2, 0, [400], greedy(), 0), "outside of the pool"),
        (SlotStart(1, as_bytes([3] * 20), 20, 9, [5], greedy(), 0), "cannot hold"),
        (SlotStart(99, as_bytes([3, 4]), 2, 0, [5], greedy(), 0), "slot 99"),
        (SlotStart(1, as_bytes([3, 4]), 2, 0, [5], greedy(logit_bias=[(VOCAB, 1.0)]), 0), "token id 211"),
        (SlotStart(1, as_bytes([3, 4]), 2, 0, [5], greedy(allowed_token_ids=[EOS], min_tokens=2), 0), "no token"),
    ],
)
def test_a_bad_slot_fails_alone(runner: Runner, bad: SlotStart, detail: str) -> None:
    prompt = prompt_of(9)
    expected = generate(runner, prompt, greedy(max_tokens=3)).output
    runner.reset(4)
    good = started(0, prompt, greedy(max_tokens=3), [1, 2])
    results = runner.execute(StepPlan(1, 1, [], [good, bad], [], [SlotRun(bad.slot, 50), SlotRun(0, 50)]))
    by_slot = {r.slot: r for r in results}
    assert by_slot[bad.slot].finish == FinishReason.FAILED
    assert detail in by_slot[bad.slot].detail
    tokens = list(by_slot[0].token_ids)
    for number in (2, 3):
        (result,) = runner.execute(StepPlan(1, number, [], [], [], [SlotRun(bad.slot, 1), SlotRun(0, 1)]))
        assert result.slot == 0
        tokens += result.token_ids
    assert tokens == expected


def test_kv_that_is_not_finite_does_not_reach_the_next_owner(runner: Runner) -> None:
    prompt = prompt_of(12)
    expected = generate(runner, prompt, greedy(max_tokens=5)).output
    runner.reset(4)
    runner.execute(StepPlan(1, 1, [], [started(0, prompt, greedy(), [6, 7])], [], [SlotRun(0, 8)]))
    with torch.inference_mode():
        runner.pool.runs[0][:, 6] = math.nan
    plan = StepPlan(1, 2, [], [], [], [SlotRun(0, 4)], [FullBlock(6, b"x" * 16)])
    (result,) = runner.execute(plan)
    assert (result.finish, result.detail) == (FinishReason.FAILED, "the model's logits are not finite")
    assert 6 not in runner.block_hashes.blocks_and_hashes()[0]
    driver = Driver(runner)
    driver.free_blocks = [7, 6, 5, 4]
    stream = driver.add(prompt, greedy(max_tokens=5))
    driver.run()
    assert stream.output == expected


# --- reports besides tokens -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"chunk": 4}, {"chunk": 5, "depth": 1, "preempt_at": (2,)}])
def test_prompt_logprobs(runner: Runner, theirs: PreTrainedModel, options: dict[str, Any]) -> None:
    prompt = prompt_of(21)
    driver = Driver(runner, **{k: v for k, v in options.items() if k != "preempt_at"})
    stream = driver.add(
        prompt, greedy(max_tokens=4, num_prompt_logprobs=3, num_logprobs=2), preempt_at=options.get("preempt_at", ())
    )
    driver.run()
    with torch.no_grad():
        logprobs = theirs(torch.tensor([prompt + stream.output])).logits[0].log_softmax(-1)
    assert sorted(stream.prompt_logprobs) == list(range(1, 21))
    for position, entry in stream.prompt_logprobs.items():
        row = logprobs[position - 1]
        assert entry.token_id == prompt[position]
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-4)
        assert entry.rank == int((row > row[entry.token_id]).sum()) + 1
        assert entry.top_ids == row.topk(3).indices.tolist()
    for i, entry in enumerate(stream.logprobs):
        row = logprobs[len(prompt) + i - 1]
        assert entry.token_id == stream.output[i]
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-4)
        assert entry.top_logprobs == pytest.approx(row.topk(2).values.tolist(), abs=1e-4)


def test_block_hashes_live_as_long_as_their_content(runner: Runner) -> None:
    runner.reset(4)
    names = [FullBlock(20, b"a" * 16), FullBlock(21, b"b" * 16)]
    first = started(0, prompt_of(17), greedy(max_tokens=1), [20, 21, 22])
    runner.execute(StepPlan(1, 1, [], [first], [], [SlotRun(0, 17)], names))
    blocks, joined = runner.block_hashes.blocks_and_hashes()
    listed = {block: joined[16 * i : 16 * i + 16] for i, block in enumerate(blocks)}
    assert (listed[20], listed[21]) == (b"a" * 16, b"b" * 16)
    runner.reset(2)  # another scheduler: slots are dropped, KV and block hashes stay
    assert set(runner.block_hashes.blocks_and_hashes()[0]) >= {20, 21}
    second = started(1, prompt_of(3), greedy(max_tokens=1), [21])
    runner.execute(StepPlan(2, 1, [], [second], [], [SlotRun(1, 3)]))
    assert 21 not in runner.block_hashes.blocks_and_hashes()[0]
    assert 20 in runner.block_hashes.blocks_and_hashes()[0]
