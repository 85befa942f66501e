"""Slots that the host samples beside steps ahead: their rows wait, and no other does."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from plan_driver import Driver
from reference_ops import run_ahead
from slot_plans import collected, greedy, plan, prompt_of, started
from ties import Score
from tiny_models import start

from blockyard.services.gpu_worker.arrays import Ints
from blockyard.services.gpu_worker.runner import Runner
from blockyard.services.gpu_worker.sampling.host_rows import HostRows, Sampled
from blockyard.services.gpu_worker.slots import Slots
from blockyard.shared.messages import FinishReason, Sampling, SlotRun, StepPlan


def host_sampled(**fields: Any) -> Sampling:
    """No kernel bans words of several tokens."""
    return greedy(bad_words=[[5, 6]], **fields)


def test_a_slot_that_the_host_samples_waits_and_the_others_run_ahead(ahead: Runner, plain: Runner) -> None:
    starts = [started(0, prompt_of(1), greedy(), [3]), started(1, prompt_of(1, 3), host_sampled(), [4])]
    expected = []
    plain.reset(4)
    for number in range(1, 4):
        expected.append(plain.execute(plan(number, 0, 1, starts=starts if number == 1 else [])))
    plain_tokens, host_tokens = ([r.token_ids for step in expected for r in step if r.slot == s] for s in (0, 1))
    ahead.reset(4)
    for number in (1, 2, 3):
        ahead.launch(plan(number, 0, 1, starts=starts if number == 1 else []))
    first = collected(ahead)
    assert [first[n][0].token_ids for n in (1, 2, 3)] == plain_tokens
    assert not any(1 in first[n] for n in (1, 2, 3)), "it computed the same token again and waited"
    ahead.launch(plan(4, 0, 1))
    ahead.launch(plan(5, 0, 1))
    second = collected(ahead)
    assert (second[4][1].token_ids, second[4][1].num_computed) == (host_tokens[0], 1)
    assert 1 not in second[5]
    ahead.launch(plan(6, 0, 1))
    third = collected(ahead)
    assert (third[6][1].token_ids, third[6][1].num_computed) == (host_tokens[1], 2)


def test_a_plan_is_answered_before_the_host_samples_its_rows(ahead: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    sampled: list[list[int]] = []
    sample = HostRows.sample

    def watched(rows: HostRows, logits: torch.Tensor, slots: Ints, table: Slots) -> Sampled:
        sampled.append(slots.tolist())
        return sample(rows, logits, slots, table)

    monkeypatch.setattr(HostRows, "sample", watched)
    ahead.reset(4)
    starts = [started(0, prompt_of(1), greedy(), [3]), started(1, prompt_of(4, 3), host_sampled(), [4])]
    ahead.launch(StepPlan(1, 1, [], starts, [], [SlotRun(0, 1), SlotRun(1, 4)]))
    first = collected(ahead)[1]
    assert first[0].token_ids and (first[1].token_ids, first[1].num_computed) == ([], 3) and sampled == []
    ahead.sample_rows()
    ahead.sample_rows()
    assert sampled == [[1]]
    ahead.launch(plan(2, 0))
    assert collected(ahead)[2].keys() == {0}, "the token waits for a plan that runs its slot"
    ahead.launch(plan(3, 0, 1))
    third = collected(ahead)[3]
    assert len(third[1].token_ids) == 1 and third[1].num_computed == 4
    ahead.launch(plan(4, 0, 1))
    assert collected(ahead)[4][1].num_computed == 5


def test_a_token_of_a_slot_that_has_another_owner_is_dropped(ahead: Runner) -> None:
    ahead.reset(4)
    ahead.launch(plan(1, 1, starts=[started(1, prompt_of(1, 3), host_sampled(), [4])]))
    collected(ahead)
    ahead.sample_rows()
    new = started(1, prompt_of(2, 5), greedy(), [5])
    ahead.launch(StepPlan(1, 2, [1], [new], [], [SlotRun(1, 2)]))
    (result,) = collected(ahead)[2].values()
    assert result.num_computed == 2


def test_a_last_token_that_was_sampled_is_a_result_of_a_plan_without_rows(ahead: Runner) -> None:
    ahead.reset(4)
    ahead.launch(plan(1, 1, starts=[started(1, prompt_of(1, 3), host_sampled(max_tokens=1), [4])]))
    collected(ahead)
    ahead.launch(plan(2, 1))
    result = collected(ahead)[2][1]
    assert (len(result.token_ids), result.finish) == (1, FinishReason.LENGTH)


def test_the_host_reads_the_logits_of_a_few_slots_a_step_and_each_gets_its_turn(
    folder: Path, logits_of: Score, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("blockyard.services.gpu_worker.sampling.logits_edits.MOST_HOST_ROWS", 2)
    ahead = start(folder, max_model_len=64)
    run_ahead(ahead, capacity=6)
    driver, alone = Driver(ahead, num_slots=6, depth=1), []
    streams = [driver.add(prompt_of(3, i), host_sampled(max_tokens=8)) for i in range(5)]
    counts = []
    while any(s.finish is None for s in streams):
        driver.queued.append(driver.plan())
        driver.step()
        counts.append([len(s.output) for s in streams])
    assert all(max(now) - min(now) <= 2 for now in counts), "no stream is left behind"
    driver.run()
    for i in range(5):
        other = Driver(ahead)
        alone.append(other.add(prompt_of(3, i), host_sampled(max_tokens=8)))
        other.run()
    assert [s.output for s in streams] == [s.output for s in alone]


def test_a_slot_that_the_host_samples_fails_alone(ahead: Runner) -> None:
    ahead.reset(4)
    starts = [started(0, prompt_of(3), host_sampled(), [6]), started(1, prompt_of(3, 1), host_sampled(), [8])]
    ahead.launch(StepPlan(1, 1, [], starts, [], [SlotRun(0, 3), SlotRun(1, 3)]))
    collected(ahead)
    with torch.inference_mode():
        ahead.pool.runs[0][:, 6, :, :, 0] = math.nan
    for number in (2, 3, 4):
        ahead.launch(plan(number, 0, 1))
    results = collected(ahead)
    assert results[2][0].token_ids and results[2][1].token_ids, "of the prompts' logits"
    assert not any(slot in results[n] for n in (3, 4) for slot in (0, 1))
    ahead.launch(plan(5, 0, 1))
    assert bool(ahead.pool.runs[0][:, 6].isfinite().all()), "also what the steps in flight wrote"
    results = collected(ahead)
    failed = results[5][0]
    assert (failed.finish, failed.detail) == (FinishReason.FAILED, "the model's logits are not finite")
    assert results[5][1].finish is None and results[5][1].token_ids
    ahead.launch(plan(6, 0, 1))
    assert collected(ahead)[6].keys() == {1}
