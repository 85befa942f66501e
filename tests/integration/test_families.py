"""Families other than the demo model's, whose tiny checkpoints are random, through the processes of a server.

tests/bench/worker/every_architecture.py does the first test with every architecture of the table, which takes minutes.
"""

from pathlib import Path

import openai
import pytest
import torch
from rig import serve
from ties import Ties
from tiny_models import BY_NAME, greedy_score
from worker.every_architecture import PROMPTS, TOKENIZER, check


@pytest.mark.parametrize(("name", "model_impl", "ranks"), [("deepseek-v2", "auto", 1), ("llama", "transformers", 2)])
def test_offline_tokens_equal_those_of_transformers(name: str, model_impl: str, ranks: int) -> None:
    check(BY_NAME[name], model_impl=model_impl, tensor_parallel_size=ranks)


def test_a_mixture_is_served(tmp_path: Path) -> None:
    theirs, ties = BY_NAME["qwen3-moe"].save(tmp_path), Ties()
    flags = ("--tokenizer", str(TOKENIZER), "--dtype", "float32", "--device", "cpu")
    with (
        serve(str(tmp_path), *flags) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        model = client.models.list().data[0].id
        answers = client.completions.create(
            model=model,
            prompt=PROMPTS,
            max_tokens=12,
            temperature=0,
            n=2,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )
    assert len(answers.choices) == 2 * len(PROMPTS)
    for choice in answers.choices:
        prompt, got = PROMPTS[choice.index // 2], list(choice.model_extra["token_ids"])
        with torch.no_grad():
            logits = theirs(torch.tensor([prompt + got])).logits[0]
        expected = logits.argmax(-1)[len(prompt) - 1 : -1].tolist()
        ties.compare(f"choice {choice.index}", prompt, expected, got, greedy_score(theirs))
    assert ties.tokens == 2 * 12 * len(PROMPTS) or ties.ties
    ties.check()
