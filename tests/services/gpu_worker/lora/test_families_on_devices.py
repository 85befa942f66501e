"""Adapters in the steps of a worker, by family, against PEFT: prompts in chunks and decoded tokens, on both devices."""

from pathlib import Path

import numpy as np
import pytest
import torch
from peft_adapters import Batch, load_adapters, save_adapter
from slot_plans import greedy
from tiny_models import BY_NAME, VOCAB, start

from blockyard.shared.config.services.lora import LoraConfig
from blockyard.shared.messages import AdapterPlaced

PROMPT = np.random.default_rng(4).integers(2, VOCAB, 40).tolist()
ATTENTION_AND_MLP = r".*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj|kv_b_proj)"
FAMILIES = {  # with the modules that have a place on both devices
    "llama": "all-linear",
    "llama-odd": "all-linear",
    "qwen3": "all-linear",
    "phi3": "all-linear",
    "gpt-neox": "all-linear",
    "falcon-40b-like": "all-linear",
    "gemma3": ATTENTION_AND_MLP,
    "gemma4": ATTENTION_AND_MLP,
    "cohere": ATTENTION_AND_MLP,
    "olmo2": "all-linear",
    "qwen3-moe": r".*\.(q_proj|k_proj|v_proj|o_proj)",
    "deepseek-v2-lite": r".*self_attn\..*_proj(_with_mqa)?",
}
STEPS = 6


@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.cpu), pytest.param("cuda", marks=pytest.mark.cuda)]
)
@pytest.mark.parametrize("name", FAMILIES)
def test_log_probabilities_are_those_of_peft(name: str, device: str, tmp_path: Path) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    model = save_adapter(BY_NAME[name].save(tmp_path / "base"), tmp_path / "adapter", target_modules=FAMILIES[name])
    runner = start(tmp_path / "base", device=device, lora=LoraConfig(max_loras=2, max_cpu_loras=2))
    runner.reset(8)
    load_adapters(runner, [tmp_path / "adapter"])
    # slots beside it without an adapter, so that rows are of both kinds
    batch = Batch(runner, [None, 1, None], [AdapterPlaced(1, 1)], greedy(num_logprobs=0), [PROMPT[:5], PROMPT, PROMPT])
    found = batch.run(STEPS)
    for slot, base in ((1, False), (2, True)):
        output = [ids[0] for ids, _ in found[slot]]
        with torch.no_grad():
            if base:
                with model.disable_adapter():
                    logits = model(torch.tensor([PROMPT + output])).logits[0]
            else:
                logits = model(torch.tensor([PROMPT + output])).logits[0]
        expected = logits[len(PROMPT) - 1 : -1].float().log_softmax(1)[torch.arange(STEPS), torch.tensor(output)]
        assert [p for _, p in found[slot]] == pytest.approx(expected.tolist(), abs=1e-4)
    assert [p for _, p in found[1]] != pytest.approx([p for _, p in found[2]], abs=0.01)
