"""--enforce-eager: the same tokens without CUDA graphs and fused kernels, for every kind of model."""

from pathlib import Path

import pytest
import torch
from plan_driver import Driver
from ties import Ties
from tiny_models import BY_NAME, greedy_score, start

from blockyard.shared.messages import Sampling

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
GREEDY = Sampling(max_tokens=12, temperature=0.0, ignore_eos=True)


@pytest.mark.parametrize(
    ("name", "model_impl"),
    [("qwen3-moe", "auto"), ("gemma3", "auto"), ("deepseek-v2", "auto"), ("llama", "transformers")],
)
@pytest.mark.parametrize("device", DEVICES)
def test_tokens_equal_those_of_transformers(device: str, name: str, model_impl: str, tmp_path: Path) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    theirs, ties = BY_NAME[name].save(tmp_path).to(device), Ties()
    runner = start(tmp_path, device=device, model_impl=model_impl, enforce_eager=True, max_model_len=128)
    driver = Driver(runner)
    streams = [driver.add(list(range(3, 3 + n)), GREEDY) for n in (4, 9, 30)]
    driver.run()
    for stream in streams:
        with torch.no_grad():
            logits = theirs(torch.tensor([stream.prompt + stream.output], device=device)).logits[0]
        expected = logits.argmax(-1)[len(stream.prompt) - 1 : -1].tolist()
        ties.compare(name, stream.prompt, expected, stream.output, greedy_score(theirs))
    ties.check()
