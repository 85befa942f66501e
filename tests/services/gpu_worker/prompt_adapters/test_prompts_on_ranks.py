"""Sequences that begin with the vectors of prompt adapters on several ranks: the leader alone has the adapters."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from peft_prompts import load_prompts, peft_logits, run_chunks, save_prompt, start_of, tokens_of
from rank_group import Group, config
from reference_ops import run_ahead
from slot_plans import collected, greedy, prompt_of
from tiny_models import BY_NAME, start
from two_ranks import CAPACITY, TwoRanks

from blockyard.services.gpu_worker.host_link import SameMemory
from blockyard.services.gpu_worker.lora.read_prompt import ReadPrompt
from blockyard.services.gpu_worker.prompt_adapters.prompt_vectors import PromptVectors
from blockyard.services.gpu_worker.runner import Runner
from blockyard.shared.config.services.lora import PromptConfig
from blockyard.shared.messages import SlotResult, SlotRun, StepPlan

PROMPTS = PromptConfig(max_tokens=40)
IDS = prompt_of(9, 1)


def results(runner: Runner, folder: Path) -> dict[int, list[SlotResult]]:
    """Of a sequence with 20 virtual tokens beside one without, in chunks that end among the virtual tokens."""
    runner.reset(8)
    assert load_prompts(runner, folder) == [""]
    sampling = greedy(num_logprobs=0, num_prompt_logprobs=0)
    return run_chunks(runner, [start_of(0, IDS, sampling, 1, 20), start_of(1, IDS, sampling)], 7, 9)


def test_logits_are_those_of_peft_where_ranks_divide_the_lookup(tmp_path: Path) -> None:
    """Of a class of transformers."""
    base, adapter, group = tmp_path / "base", tmp_path / "adapter", tmp_path / "group"
    theirs = save_prompt(BY_NAME["llama"].save(base), adapter, 20)
    group.mkdir()
    made = Group(config(base, prompts=PROMPTS, model_impl="transformers"), group)
    try:
        found = results(made.start(), adapter)
    finally:
        made.team.close()
    assert not made.errors
    scores = peft_logits(theirs, IDS).log_softmax(-1)
    wanted = [float(scores[at - 1, IDS[at]]) for at in range(1, len(IDS))]
    got = [one.logprob for result in found[0] for one in result.prompt_logprobs]
    assert got == pytest.approx(wanted, abs=1e-4)
    assert tokens_of(found[0])[0] == int(scores[-1].argmax())
    assert tokens_of(found[1]) != tokens_of(found[0])


def test_vectors_of_16_bits_reach_the_first_stage(tmp_path: Path) -> None:
    """A stage computes what one rank does, to the last bit. Its embeddings have positions added."""
    base, adapter, group = tmp_path / "base", tmp_path / "adapter", tmp_path / "group"
    save_prompt(BY_NAME["gpt2"].save(base), adapter, 20)
    group.mkdir()
    expected = results(start(base, prompts=PROMPTS, dtype="bfloat16"), adapter)
    made = Group(config(base, 1, 2, prompts=PROMPTS, dtype="bfloat16"), group)
    try:
        assert results(made.start(), adapter) == expected
    finally:
        made.team.close()
    assert not made.errors


class FakeReader:
    """Reads one adapter of random vectors."""

    def __init__(self, width: int) -> None:
        self._vectors = torch.randn(20, width, generator=torch.Generator().manual_seed(2))
        self._jobs: list[int] = []

    def ask(self, job: int, path: str, *, is_prompt: bool = False) -> None:
        self._jobs.append(job)

    def receive_prompts(self) -> Iterator[tuple[int, ReadPrompt | str]]:
        while self._jobs:
            yield self._jobs.pop(), ReadPrompt(self._vectors, b"digest", [])

    def receive(self) -> list[tuple[int, str]]:
        return []

    def close(self) -> None: ...


@pytest.mark.parametrize(("size", "num_stages"), [(2, 1), (1, 2)])
def test_steps_of_a_gpu_send_them_to_followers(size: int, num_stages: int, tmp_path: Path) -> None:
    folder, group = tmp_path / "model", tmp_path / "group"
    group.mkdir()
    BY_NAME["llama"].save(folder)
    alone = start(folder, max_num_seqs=CAPACITY)
    run_ahead(alone, CAPACITY, masks=False)
    ranks, found = TwoRanks(folder, group, alone.geometry, size, num_stages), list[list[int]]()
    for runner in (alone, ranks.runner):
        runner.reset(4)
        prompts = PromptVectors(FakeReader(64), torch.device("cpu"), SameMemory())  # type: ignore[arg-type]
        prompts.load(1, "")
        prompts.poll()
        runner.batch.prompts = prompts
        starts = [start_of(0, IDS, greedy(), 1, 20), start_of(1, IDS, greedy())]
        runner.launch(StepPlan(1, 1, [], starts, [], [SlotRun(0, 12), SlotRun(1, 64)]))
        runner.launch(StepPlan(1, 2, [], [], [], [SlotRun(0, 64), SlotRun(1, 1)]))
        done = collected(runner)
        found.append([token for number in (1, 2) for one in done[number].values() for token in one.token_ids])
    ranks.close()
    assert found[0] == found[1] and len(found[0]) == 3
    assert [one.num_vectors for one in ranks.forwards][:2] == [12, 8]
