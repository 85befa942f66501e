"""Mixtures of experts by their classes in transformers, against the same classes alone."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from plan_driver import Driver
from tiny_classes import check_two_streams, compare_tokens, save_tiny, tiny_config
from tiny_models import start
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.activations import ACT2FN

from blockyard.kernels.moe.gates import Gate
from blockyard.services.gpu_worker.layers.fused_ops import OPS
from blockyard.services.gpu_worker.layers.triton_ops import TritonOps
from blockyard.services.gpu_worker.models.transformers_layers import experts
from blockyard.services.gpu_worker.models.transformers_layers.experts import are_experts, find_kind
from blockyard.shared.errors import ConfigError
from blockyard.shared.messages import Sampling

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KINDS = ["qwen3_moe", "mixtral", "ernie4_5_moe", "dots1", "flex_olmo", "granitemoeshared", "hunyuan_v1_moe", "phimoe"]
KINDS += ["glm4_moe", "afmoe", "aria_text"]  # biases for the choice; stacks as [experts, in, out]
NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_in_float32(kind: str, tmp_path: Path) -> None:
    theirs = save_tiny(kind, tmp_path)
    compare_tokens(kind, start(tmp_path, model_impl="transformers", max_model_len=128), theirs, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_log_probabilities_in_16_bits(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """All tokens of two prompts in one batch have them as near to those in float32 as transformers' are in 16 bits."""
    exact = save_tiny(kind, tmp_path)
    made: Any = AutoModelForCausalLM
    own = {"attn_implementation": "eager", "experts_implementation": "eager"}
    theirs = made.from_pretrained(tmp_path, dtype=dtype, **own).eval()
    driver = Driver(start(tmp_path, model_impl="transformers", max_model_len=128, dtype=NAMES[dtype]), seed=3)
    rng, sampling = np.random.default_rng(3), Sampling(max_tokens=1, temperature=0.0, num_prompt_logprobs=0)
    streams = [driver.add(rng.integers(7, 200, n).tolist(), sampling) for n in (40, 23)]
    driver.run()
    ours_off, theirs_off = [], []
    for stream in streams:
        with torch.no_grad():
            wanted, got = (
                model(torch.tensor([stream.prompt])).logits[0].float().log_softmax(-1) for model in (exact, theirs)
            )
        for i, token in enumerate(stream.prompt[1:]):
            ours_off.append(abs(float(wanted[i, token]) - stream.prompt_logprobs[i + 1].logprob))
            theirs_off.append(abs(float(wanted[i, token] - got[i, token])))
    assert len(ours_off) == 61
    assert np.median(ours_off) < 1.5 * np.median(theirs_off), (np.median(ours_off), np.median(theirs_off))


@pytest.mark.parametrize("kind", ["mixtral", "glm4_moe"])
def test_tokens_by_the_kernels_of_a_gpu(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton's interpreter, but for attention and matrix products outside of the experts."""
    from blockyard.services.gpu_worker.layers.moe.grouped_experts import GroupedExperts

    theirs = save_tiny(kind, tmp_path).to(DEVICE)
    monkeypatch.setitem(OPS, "cpu", TritonOps)
    monkeypatch.setattr(experts, "find_experts", GroupedExperts)
    check_two_streams(theirs, start(tmp_path, device=DEVICE, model_impl="transformers", max_model_len=128), DEVICE)


def experts_of(kind: str, **changed: Any) -> nn.Module:
    made: Any = AutoModelForCausalLM
    with torch.device("meta"):
        model = made.from_config(tiny_config(kind, **changed))
    return next(module for module in model.modules() if are_experts(module))


def test_the_kind_is_told_by_what_a_small_copy_computes() -> None:
    assert find_kind(experts_of("mixtral"), 2).gate is Gate.SILU
    assert find_kind(experts_of("mixtral", hidden_act="gelu_pytorch_tanh"), 2).gate is Gate.GELU_TANH
    aria = find_kind(experts_of("aria_text"), 2)
    assert aria.transposed and (aria.hidden, aria.routing.num_experts) == (64, 6)


@pytest.mark.parametrize("act", ["relu", "gelu"])
def test_other_activations_are_refused(act: str, tmp_path: Path) -> None:
    assert act in ACT2FN
    save_tiny("mixtral", tmp_path, hidden_act=act)
    message = "MixtralForCausalLM is refused: its MixtralExperts computes other experts than"
    with pytest.raises(ConfigError, match=message):
        start(tmp_path, model_impl="transformers", max_model_len=128)


def test_a_batch_invariant_worker_refuses_routers_that_multiply_themselves(tmp_path: Path) -> None:
    save_tiny("mixtral", tmp_path)
    message = "--batch-invariant: .* MixtralExperts, MixtralTopKRouter multiply"
    with pytest.raises(ConfigError, match=message):
        start(tmp_path, model_impl="transformers", max_model_len=128, batch_invariant=True)


def test_a_checkpoint_may_have_the_stacks_of_the_class(tmp_path: Path) -> None:
    """`save_pretrained(save_original_format=False)` writes them so."""
    theirs = save_tiny("mixtral", tmp_path)
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    theirs.save_pretrained(tmp_path, save_original_format=False)
    names = json.dumps([str(name) for name in theirs.state_dict()])
    assert "experts.gate_up_proj" in names
    compare_tokens("stacks", start(tmp_path, model_impl="transformers", max_model_len=128), theirs, torch.float32)
