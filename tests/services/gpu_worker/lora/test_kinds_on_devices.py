"""What adapters change beside dense layers in the steps of a GPU, against PEFT: rows of embedding and head, tokens that
they add, experts and routers. On the CPU the steps and places of a GPU run in plain torch."""

from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import reference_experts
import torch
from device_adapters import start_on
from peft_adapters import Batch, load_adapters, save_adapter
from slot_plans import greedy
from tiny_models import BY_NAME, VOCAB

from blockyard.services.gpu_worker.runner import Runner
from blockyard.shared.config.services.lora import LoraConfig
from blockyard.shared.messages import AdapterPlaced, Sampling

PROMPT = np.random.default_rng(4).integers(2, VOCAB, 20).tolist()
ROWS = sorted({*PROMPT[3:9], 208, 209, 210})
SAVED = {"modules_to_save": ["embed_tokens", "lm_head"], "trained_rows": ROWS}
OF_TOKENS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"target_modules": ["embed_tokens", "lm_head"]}),
    ("llama-tied", {"target_modules": ["embed_tokens", "q_proj"]}),
    ("gemma", {"target_modules": ["embed_tokens", "lm_head"]}),
    ("gpt2", {"target_modules": ["wte", "c_attn"]}),
    ("llama", {"target_modules": ["q_proj"], **SAVED}),
    ("llama-tied", {"target_modules": ["q_proj"], "trainable_token_indices": ROWS}),
    ("gemma2", {"target_modules": ["q_proj"], "trainable_token_indices": ROWS}),
    ("llama", {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": ROWS[:3], "lm_head": ROWS}}),
]
ADDED = 3
ADDING: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"target_modules": ["q_proj"]}),
    ("llama", {"target_modules": ["embed_tokens", "lm_head", "v_proj"]}),
    ("llama-tied", {"target_modules": ["embed_tokens"]}),
    ("gemma2", {"target_modules": ["q_proj"], "trainable_token_indices": [9, VOCAB, VOCAB + 2]}),
]
OF_EXPERTS: list[tuple[str, dict[str, Any]]] = [
    ("qwen3-moe", {"target_modules": "all-linear"}),
    ("mixtral", {"target_modules": "all-linear"}),
    ("glm4-moe", {"target_modules": "all-linear"}),
    ("qwen2-moe", {"target_modules": "all-linear"}),
    ("gemma4-moe", {"target_modules": "all-linear"}),
    ("qwen3-moe", {"target_modules": [], "target_parameters": ["mlp.gate.weight"]}),
    ("qwen3-moe", {"target_modules": [], "target_parameters": ["mlp.experts.gate_up_proj"]}),
    ("gpt-oss", {"target_modules": "all-linear"}),
    ("gpt-oss", {"target_modules": [], "target_parameters": ["gate_up_proj", "down_proj"], "r": 3}),
]
LORA = LoraConfig(max_loras=2, max_cpu_loras=2, with_experts=True)
DEVICES = [pytest.param("reference", marks=pytest.mark.cpu), pytest.param("cuda", marks=pytest.mark.cuda)]
STEPS = 5

pytestmark = pytest.mark.parametrize("device", DEVICES)


@pytest.fixture(autouse=True)
def _needs_device(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    if device == "reference":
        reference_experts.use(monkeypatch)


def loaded(device: str, folder: Path, **fields: Any) -> Runner:
    runner = start_on(device, folder / "base", LORA, **fields)
    runner.reset(8)
    load_adapters(runner, [folder / "adapter"])
    return runner


def check(runner: Runner, model: peft.PeftModel, prompt: list[int], sampling: Sampling, num_added: int = 0) -> None:
    """A sequence with the adapter, beside two without one."""
    plain, placed = [token for token in prompt if token < VOCAB], [AdapterPlaced(1, 1)]
    found = Batch(runner, [None, 1, None], placed, sampling, [plain[:5], prompt, plain], num_added).run(STEPS)
    output = [ids[0] for ids, _ in found[1]]
    with torch.no_grad():
        logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1].float()
    expected = logits.log_softmax(1)[torch.arange(STEPS), torch.tensor(output)]
    assert [p for _, p in found[1]] == pytest.approx(expected.tolist(), abs=1e-4)
    assert logits.argmax(1).tolist() == output or sampling.allowed_token_ids
    with torch.no_grad(), model.disable_adapter():
        of_base = model(torch.tensor([plain])).logits[0, -1, :VOCAB].float().log_softmax(0)
    assert found[2][0][1] == pytest.approx(float(of_base[found[2][0][0][0]]), abs=1e-4)
    assert all(ids[0] < VOCAB for slot in (0, 2) for ids, _ in found[slot])


@pytest.mark.parametrize(("name", "fields"), OF_TOKENS, ids=str)
def test_rows_of_tokens(name: str, fields: dict[str, Any], device: str, tmp_path: Path) -> None:
    model = save_adapter(BY_NAME[name].save(tmp_path / "base"), tmp_path / "adapter", **fields)
    check(loaded(device, tmp_path), model, PROMPT, greedy(num_logprobs=0))


@pytest.mark.parametrize(("name", "fields"), ADDING, ids=str)
def test_added_tokens(name: str, fields: dict[str, Any], device: str, tmp_path: Path) -> None:
    """They are read, they are generated, and no other row generates one."""
    theirs = BY_NAME[name].save(tmp_path / "base")
    theirs.resize_token_embeddings(VOCAB + ADDED, mean_resizing=False)
    model = save_adapter(theirs, tmp_path / "adapter", saves_embedding=True, **fields)
    runner, prompt = loaded(device, tmp_path), [*PROMPT[:7], VOCAB, *PROMPT[7:], VOCAB + 2]
    check(runner, model, prompt, greedy(num_logprobs=0), ADDED)
    runner.reset(8)
    penalized = greedy(num_logprobs=0, allowed_token_ids=[VOCAB + 1, VOCAB + 2, 7], presence_penalty=2.0)
    noisy = greedy(num_logprobs=0, temperature=0.7, seed=5, top_k=200)
    of_host = loaded("cpu", tmp_path)
    for sampling in (penalized, noisy):
        both = []
        for one in (of_host, runner):
            one.reset(8)
            [found] = Batch(one, [1], [AdapterPlaced(1, 1)], sampling, [prompt], ADDED).run(STEPS)
            both.append([ids for ids, _ in found])
        assert both[0] == both[1]
        assert sampling is noisy or any(ids[0] >= VOCAB for ids in both[1])


@pytest.mark.parametrize(("name", "fields"), OF_EXPERTS, ids=str)
def test_experts_and_routers(name: str, fields: dict[str, Any], device: str, tmp_path: Path) -> None:
    model = save_adapter(BY_NAME[name].save(tmp_path / "base"), tmp_path / "adapter", **fields)
    check(loaded(device, tmp_path), model, PROMPT, greedy(num_logprobs=0))
