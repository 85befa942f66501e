"""Sequences that begin with the vectors of prompt adapters, in the steps of a runner, against PEFT."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft_adapters import load_adapters, save_adapter
from peft_prompts import load_prompts, peft_logits, run_chunks, save_prompt, start_of, tokens_of
from reference_ops import run_ahead
from slot_plans import greedy, prompt_of
from tiny_models import BY_NAME, start

from blockyard.services.gpu_worker.runner import Runner
from blockyard.shared.config.services.lora import LoraConfig, PromptConfig
from blockyard.shared.messages import AdapterPlaced, SlotRun, StepPlan

PROMPTS = PromptConfig(max_tokens=40)
# name, implementation, steps as on a GPU: vectors are scaled in other ways, and positions added
CASES = [
    *(("llama", "auto", False), ("llama", "auto", True), ("llama", "transformers", False)),
    *(("gemma2", "auto", False), ("granite", "auto", False), ("gpt2", "auto", True)),
]


def made(tmp_path: Path, name: str = "llama", **fields: Any) -> tuple[Runner, list[Any]]:
    """A runner with adapters 1, of 5 tokens, and 2, of 20, and PEFT's models of them."""
    base, models = tmp_path / "base", []
    for number, (tokens, encoded) in enumerate(((5, False), (20, True))):
        models.append(save_prompt(BY_NAME[name].save(base), tmp_path / f"{number}", tokens, encoded, seed=number))
    runner = start(base, prompts=PROMPTS, **fields)
    runner.reset(8)
    assert load_prompts(runner, tmp_path / "0", tmp_path / "1") == ["", ""]
    return runner, models


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_on_a_gpu(name: str, tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    runner, models = made(tmp_path, name, device="cuda")
    ids = [prompt_of(9, 1), prompt_of(12, 2)]
    for chunk in (64, 7):
        runner.reset(8)
        load_prompts(runner, tmp_path / "0", tmp_path / "1")
        starts = [start_of(0, ids[0], greedy(), 1, 5), start_of(1, ids[1], greedy(), 2, 20)]
        found = run_chunks(runner, starts, chunk, -(-32 // chunk) + 3)
        for slot, model in enumerate(models):
            assert tokens_of(found[slot])[:4] == expected(model, ids[slot], 4)[0]


def expected(model: Any, ids: list[int], num: int) -> tuple[list[int], list[float]]:
    """PEFT's greedy tokens, and the log-probabilities of the prompt's tokens but the first."""
    known = list(ids)
    for _ in range(num):
        known.append(int(peft_logits(model, known)[-1].argmax()))
    scores = peft_logits(model, ids).log_softmax(-1)
    return known[len(ids) :], [float(scores[at - 1, ids[at]]) for at in range(1, len(ids))]


@pytest.mark.parametrize(("name", "model_impl", "is_ahead"), CASES)
def test_logits_are_those_of_peft(name: str, model_impl: str, is_ahead: bool, tmp_path: Path) -> None:
    runner, models = made(tmp_path, name, model_impl=model_impl)
    if is_ahead:
        run_ahead(runner, 16)
    sampling, ids = greedy(num_logprobs=0, num_prompt_logprobs=0), [prompt_of(9, 1), prompt_of(12, 2)]
    wanted = [expected(model, one, 4) for model, one in zip(models, ids, strict=True)]
    for chunk in (64, 7, 1):
        runner.reset(8)
        load_prompts(runner, tmp_path / "0", tmp_path / "1")
        starts = [
            start_of(0, ids[0], sampling, 1, 5),
            start_of(1, ids[1], sampling, 2, 20),
            start_of(2, ids[0], sampling),
        ]
        found = run_chunks(runner, starts, chunk, -(-32 // chunk) + 3)
        for slot, (tokens, scores) in enumerate(wanted):
            assert tokens_of(found[slot])[:4] == tokens, f"chunks of {chunk}"
            got = [one.logprob for result in found[slot] for one in result.prompt_logprobs]
            assert got == pytest.approx(scores, abs=1e-4)
        assert tokens_of(found[2])[:4] != tokens_of(found[0])[:4], "its neighbours' vectors are not its own"


def test_a_sequence_that_starts_again_behind_cached_virtual_tokens(tmp_path: Path) -> None:
    """As after preemption, or a prefix hit that ends among them."""
    runner, models = made(tmp_path)
    ids = prompt_of(9, 1)
    tokens, _ = expected(models[1], ids, 3)
    for cached in (0, 8, 16):
        first = start_of(0, ids, greedy(), 2, 20)
        assert tokens_of(run_chunks(runner, [first], 64, 3)[0]) == tokens
        runner.batch.reset(8)
        again = run_chunks(runner, [type(first)(**{**_fields(first), "num_computed": cached})], 6, 9)[0]
        assert tokens_of(again)[:3] == tokens
        runner.batch.reset(8)


def _fields(struct: Any) -> dict[str, Any]:
    return {name: getattr(struct, name) for name in struct.__struct_fields__}


def test_penalties_do_not_count_virtual_tokens(tmp_path: Path) -> None:
    """Their placeholders are the id 0, which a penalty of the prompt would make less likely."""
    runner, models = made(tmp_path)
    ids = prompt_of(6, 4)
    logits = peft_logits(models[0], ids)[-1]
    order = [token for token in logits.argsort(descending=True).tolist() if token not in ids]
    allowed = [0, order[order.index(0) + 1]]  # the other one is a little less likely
    sampling = greedy(repetition_penalty=100.0, allowed_token_ids=allowed)
    [result] = run_chunks(runner, [start_of(0, ids, sampling, 1, 5)], 64, 1)[0]
    assert result.token_ids == [0]


def test_a_lora_adapter_beside_it(tmp_path: Path) -> None:
    base, lora = BY_NAME["llama"].save(tmp_path / "base"), tmp_path / "lora"
    save_adapter(base, lora, target_modules=["q_proj", "down_proj"])
    save_prompt(BY_NAME["llama"].save(tmp_path / "base"), tmp_path / "prompt", 5)
    runner = start(tmp_path / "base", prompts=PROMPTS, lora=LoraConfig())
    runner.reset(8)
    load_adapters(runner, [lora])
    assert runner.adapters is not None
    runner.adapters.load(2, str(tmp_path / "prompt"), is_prompt=True)
    assert [one.num_virtual_tokens for one in runner.adapters.poll()] == [5]
    both = start_of(0, prompt_of(9), greedy(num_logprobs=0), 2, 5, adapter_place=0)
    plain = start_of(1, prompt_of(9), greedy(num_logprobs=0), 2, 5)
    plan = StepPlan(1, 1, [], [both, plain], [], [SlotRun(0, 64), SlotRun(1, 64)], adapters=[AdapterPlaced(0, 1)])
    first, second = sorted(runner.execute(plan), key=lambda one: one.slot)
    assert abs(first.logprobs[0].logprob - second.logprobs[0].logprob) > 1e-4


def test_what_the_worker_does_not_have_fails_its_slot_alone(tmp_path: Path) -> None:
    runner, _ = made(tmp_path)
    adapters = ((7, 5), (1, 6), (None, 0))
    starts = [start_of(slot, prompt_of(9), greedy(), *one) for slot, one in enumerate(adapters)]
    results = runner.execute(StepPlan(1, 1, [], starts, [], [SlotRun(slot, 64) for slot in range(3)]))
    assert {one.slot: one.detail for one in results} == {
        0: "prompt adapter 7 is not in this worker",
        1: "prompt adapter 1 is not in this worker",
        2: "",
    }


def test_an_adapter_that_is_dropped_stays_with_its_sequences(tmp_path: Path) -> None:
    runner, models = made(tmp_path)
    ids = prompt_of(9, 1)
    starts, runs = [start_of(0, ids, greedy(), 1, 5)], [SlotRun(0, 4)]
    runner.execute(StepPlan(1, 1, [], starts, [], runs))
    assert runner.adapters is not None
    runner.adapters.drop(1)
    found = [runner.execute(StepPlan(1, number, [], [], [], runs)) for number in range(2, 6)]
    assert tokens_of([one for results in found for one in results]) == expected(models[0], ids, 2)[0]
