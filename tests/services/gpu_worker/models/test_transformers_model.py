"""Classes of transformers over our attention and linear layers, against the same classes alone, in float32."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from plan_driver import Driver
from safetensors.torch import load_file, save_file
from ties import Ties
from tiny_classes import check_two_streams, compare_tokens, save_tiny
from tiny_models import BY_NAME, LLAMA, VOCAB, Tiny, greedy_score, start
from transformers import (
    ArceeConfig,
    ArceeForCausalLM,
    Exaone4Config,
    Exaone4ForCausalLM,
    HeliumConfig,
    HeliumForCausalLM,
)

from blockyard.services.gpu_worker.layers.fused_ops import OPS
from blockyard.services.gpu_worker.layers.triton_ops import TritonOps
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.models import registry
from blockyard.services.gpu_worker.models.transformers_layers.fusions import Fusions
from blockyard.services.gpu_worker.models.transformers_layers.norms import NormModule
from blockyard.services.gpu_worker.models.transformers_model import at_their_rows, build, trace_layers
from blockyard.shared.architectures import find_architecture
from blockyard.shared.errors import ConfigError, LoadError
from blockyard.shared.messages import Sampling

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROPE = {"rope_type": "default"}
CLASSES = [
    Tiny("arcee", ArceeConfig, ArceeForCausalLM, LLAMA | {"head_dim": 16}, ROPE),
    Tiny("helium", HeliumConfig, HeliumForCausalLM, LLAMA | {"head_dim": 16, "tie_word_embeddings": True}, ROPE),
    Tiny(
        "exaone4", Exaone4Config, Exaone4ForCausalLM, LLAMA | {"sliding_window": 12, "sliding_window_pattern": 2}, ROPE
    ),
    BY_NAME["mistral-window"],
    BY_NAME["llama"],
    BY_NAME["gemma"],
    BY_NAME["qwen2"],
    BY_NAME["phi3"],
]


@pytest.mark.parametrize("tiny", CLASSES, ids=lambda tiny: tiny.name)
def test_tokens_alone_batched_chunked_and_preempted(tiny: Tiny, tmp_path: Path) -> None:
    theirs = tiny.save(tmp_path).to(DEVICE)
    runner = start(tmp_path, device=DEVICE, model_impl="transformers")
    sampling, score, ties = Sampling(max_tokens=24, temperature=0.0, ignore_eos=True), greedy_score(theirs), Ties()
    rng = np.random.default_rng(5)
    prompts = [rng.integers(2, VOCAB, n).tolist() for n in (1, 9, 30, 45)]
    for options, preempt_at in (({}, ()), ({"chunk": 7}, ()), ({"chunk": 11, "depth": 1}, (5,))):
        driver = Driver(runner, seed=3, **options)
        streams = [driver.add(prompt, sampling, preempt_at=preempt_at) for prompt in prompts]
        driver.run()
        for stream in streams:
            with torch.no_grad():
                logits = theirs(torch.tensor([stream.prompt + stream.output], device=DEVICE)).logits[0]
            expected = logits.argmax(-1)[len(stream.prompt) - 1 : -1].tolist()
            ties.compare(tiny.name, stream.prompt, expected, stream.output, score)
    ties.check()


@pytest.mark.parametrize(
    ("kind", "changed"),
    [
        ("gpt_bigcode", {}),
        ("biogpt", {}),
        ("opt", {"activation_function": "gelu"}),
        ("apertus", {}),  # buffers in the checkpoint
        ("stablelm", {}),  # hands no arguments on to its attention
        ("ctrl", {}),  # a tied head with a bias
        ("youtu", {}),  # values smaller than keys
        ("gpt_neox", {}),  # another name of the head in checkpoints
        ("got_ocr2", {}),  # the text part of a model that sees
    ],
)
def test_tokens_of_classes_with_something_of_their_own(kind: str, changed: dict[str, Any], tmp_path: Path) -> None:
    theirs = save_tiny(kind, tmp_path, **changed)
    runner = start(tmp_path, device="cpu", model_impl="transformers", max_model_len=128)
    compare_tokens(kind, runner, theirs, torch.float32)


def test_buffers_of_a_checkpoint_are_needed(tmp_path: Path) -> None:
    """transformers runs with whatever was in their memory before."""
    save_tiny("apertus", tmp_path)
    [file] = tmp_path.glob("*.safetensors")
    save_file({name: weight for name, weight in load_file(file).items() if not name.endswith("act_fn.beta")}, file)
    with pytest.raises(LoadError, match=r"lacks model\.layers\.0\.mlp\.act_fn\.beta and 1 more"):
        start(tmp_path, device="cpu", model_impl="transformers", max_model_len=128)


def test_a_head_of_its_own_is_used_although_the_flag_ties_it(tmp_path: Path) -> None:
    theirs = save_tiny("helium", tmp_path, tie_word_embeddings=False)
    runner = start(
        tmp_path,
        device="cpu",
        model_impl="transformers",
        max_model_len=128,
        config_overrides='{"tie_word_embeddings": true}',
    )
    compare_tokens("helium", runner, theirs, torch.float32)


def test_places_and_order_of_a_class_with_our_modules() -> None:
    config = LLAMA | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "tie_word_embeddings": True}
    table = WeightTable(torch.float32, torch.device("meta"))
    model = build(config, table)
    assert [linear.shape for linear in model.linears()] == [(64, 128), (64, 64), (64, 192), (96, 64)] * 3 + [(64, 211)]
    own = ["input_layernorm", "post_attention_layernorm", *(f"self_attn.{name}_proj" for name in "qkvo")]
    own += [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    expected = {f"model.layers.{i}.{name}.weight" for i in range(3) for name in own}
    assert table.places.keys() == expected | {"model.embed_tokens.weight", "model.norm.weight"}


def test_a_class_that_does_not_run_with_our_modules_runs_with_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """For example a class that reads the weight of a norm itself."""

    def fail(self: Any, *args: Any) -> None:
        raise AttributeError("no weight")

    monkeypatch.setattr(NormModule, "forward", fail)
    theirs = BY_NAME["llama"].save(tmp_path)
    layers = trace_layers(BY_NAME["llama"].config_json(), torch.float32)
    assert layers.fusions == Fusions() and "runs with its own modules" in caplog.text
    runner = start(tmp_path, device="cpu", model_impl="transformers")
    driver = Driver(runner, seed=3)
    stream = driver.add([5, 9, 11], Sampling(max_tokens=8, temperature=0.0, ignore_eos=True))
    driver.run()
    with torch.no_grad():
        logits = theirs(torch.tensor([stream.prompt + stream.output])).logits[0]
    assert stream.output == logits.argmax(-1)[2:-1].tolist()


@pytest.mark.parametrize("name", ["llama", "gemma", "exaone4"])
def test_tokens_by_the_kernels_of_a_gpu(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton's interpreter, but for attention and matrix products."""
    tiny = next(one for one in CLASSES if one.name == name)
    theirs = tiny.save(tmp_path).to(DEVICE)
    monkeypatch.setitem(OPS, "cpu", TritonOps)
    check_two_streams(theirs, start(tmp_path, device=DEVICE, model_impl="transformers"), DEVICE)


def test_auto_takes_transformers_for_what_the_table_lacks() -> None:
    known = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    unknown = {"architectures": ["HeliumForCausalLM"], "model_type": "helium"}
    assert find_architecture(unknown["architectures"]) is None
    assert registry.is_of_transformers(registry.find_family(unknown))
    assert not registry.is_of_transformers(registry.find_family(known))
    assert registry.is_of_transformers(registry.find_family(known, "transformers"))
    for refused in ({"architectures": ["MadeUp"]}, {"architectures": ["BloomForCausalLM"], "model_type": "bloom"}):
        with pytest.raises(ConfigError, match="is not supported"):
            registry.find_family(refused)


SMALL = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
LONG_ROPE: dict[str, Any] = {"rope_type": "longrope", "rope_theta": 5000.0, "factor": 4.0}
LONG_ROPE |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "model_type is missing"),
        ({"architectures": ["MadeUpForCausalLM"], "model_type": "made-up"}, "not supported.*model_type made-up"),
        ({"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "head_dim": 8} | SMALL, "a soft cap"),
        ({"architectures": ["MambaForCausalLM"], "model_type": "mamba"} | SMALL, "max_position|attention|flat batch"),
        ({"architectures": ["BloomForCausalLM"], "model_type": "bloom"} | SMALL, "attention|flat batch"),
        (
            {"architectures": ["GPTJForCausalLM"], "model_type": "gptj"} | SMALL,
            "GPTJForCausalLM is .* attention itself",
        ),
        (
            {"architectures": ["GPTNeoForCausalLM"], "model_type": "gpt_neo", "attention_types": [[["global"], 2]]}
            | {"num_layers": 2, "num_heads": 2, "hidden_size": 16},
            "GPTNeoForCausalLM is refused: it computes its attention itself",
        ),
        ({"architectures": ["FalconForCausalLM"], "model_type": "falcon"} | SMALL, "FalconForCausalLM is .* itself"),
        ({"architectures": ["DogeForCausalLM"], "model_type": "doge"} | SMALL, "DogeAttention makes a mask of its own"),
        ({"architectures": ["BertLMHeadModel"], "model_type": "bert"} | SMALL, "BertLMHeadModel is .* no causal order"),
        ({"architectures": ["JetMoeForCausalLM"], "model_type": "jetmoe"}, "JetMoeForCausalLM is .* on the host"),
        ({"architectures": ["WhisperForCausalLM"], "model_type": "whisper"}, "WhisperForCausalLM has no max_position"),
        (
            {"architectures": ["Mamba2ForCausalLM"], "model_type": "mamba2"}
            | {"time_step_limit": [0.0, {"__float__": "Infinity"}]},
            "Mamba2ForCausalLM is refused: none of its layers has attention",
        ),
        ({"architectures": ["Llama4ForCausalLM"], "model_type": "llama4_text"} | SMALL, "chunked_attention are not"),
        (
            {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rope_parameters": LONG_ROPE} | SMALL,
            "rope_type longrope are not",
        ),
        (
            {"architectures": ["LlamaForCausalLM"], "model_type": "llama"} | SMALL | {"num_attention_heads": 3},
            r"model_type llama: .*The hidden size \(16\) is not a multiple",
        ),
    ],
)
def test_what_cannot_run_is_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(config, WeightTable(torch.float32, torch.device("meta")))


def test_rows_of_the_last_layer_are_put_in_their_places() -> None:
    """Rows that pad a captured step repeat the row of another one."""
    out = torch.tensor([[[1.0]], [[2.0]], [[3.0]], [[4.0]]])
    made = at_their_rows(out, torch.tensor([0, 3, 0, 0]), 5)
    assert made.flatten().tolist() == [1, 0, 0, 2, 0]
    assert at_their_rows(out, torch.tensor([3, 1, 0, 2]), 4).flatten().tolist() == [3, 2, 4, 1]
