"""The trial that proves that a class of transformers computes each token of a batch as if it were alone."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_classes import tiny_config
from torch import Tensor
from transformers.models.falcon_h1 import modeling_falcon_h1
from transformers.models.llama import modeling_llama
from transformers.models.mistral import modeling_mistral

from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.models import transformers_model
from blockyard.services.gpu_worker.models.transformers_model import build, prove_rows
from blockyard.shared.errors import ConfigError


def config_of(kind: str, architecture: str, **changed: Any) -> dict[str, Any]:
    fields = json.loads(tiny_config(kind, **changed).to_json_string(use_diff=False))
    kept = {name: value for name, value in fields.items() if value is not None}
    return kept | {"architectures": [architecture], "model_type": kind}


def prove(config: dict[str, Any]) -> None:
    prove_rows.__wrapped__(json.dumps(config))  # a class may be another one than in an earlier test


@pytest.mark.parametrize(
    ("kind", "architecture", "module"),
    [
        ("lfm2", "Lfm2ForCausalLM", r"Lfm2ShortConv \(layers.2.conv\)"),  # behind two layers with attention
        ("bamba", "BambaForCausalLM", r"BambaMixer \(layers.2.mamba\)"),
        ("falcon_h1", "FalconH1ForCausalLM", r"FalconH1Mixer \(layers.0.mamba\)"),  # beside the attention of its layer
        ("zaya", "ZayaForCausalLM", r"ZayaCCAProjection \(layers.0.self_attn.qkv_proj\)"),  # inside of the attention
        ("minimax", "MiniMaxForCausalLM", r"MiniMaxLightningAttention \(layers.1.self_attn\)"),
        ("bart", "BartForCausalLM", "BartLearnedPositionalEmbedding"),  # positions are places in the batch
    ],
)
def test_what_looks_at_other_rows_is_refused_by_name(kind: str, architecture: str, module: str) -> None:
    message = f"{architecture} is refused: it mixes the rows of a batch, .* its {module}"
    with pytest.raises(ConfigError, match=message):
        build(config_of(kind, architecture), WeightTable(torch.float32, torch.device("meta")))


def test_a_class_whose_states_have_no_layer_in_this_model_runs() -> None:
    prove(config_of("lfm2", "Lfm2ForCausalLM", layer_types=["full_attention"] * 4))


def test_a_module_of_which_the_trial_sees_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling_falcon_h1, "compute_mup_vector", lambda config: torch.zeros(1, 1, 1))
    with pytest.raises(ConfigError, match=r"its FalconH1Mixer \(layers.0.mamba\) computes only zeros"):
        prove(config_of("falcon_h1", "FalconH1ForCausalLM"))


def _shifted(self: Any, x: Tensor) -> Tensor:
    """Rows of models that mix each token with the one before."""
    return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x.roll(1, 1)))


def _counted(self: Any, x: Tensor) -> Tensor:
    """A limit that follows from all rows together."""
    return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)).clamp(max=float(x.mean()))


@pytest.mark.parametrize("forward", [_shifted, _counted])
def test_an_mlp_that_reads_other_rows_is_refused(
    forward: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of("llama", "LlamaForCausalLM")
    prove(config)
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", forward)
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM is refused: it mixes .* its LlamaMLP \(layers.0.mlp\)"):
        prove(config)


def test_a_window_that_only_the_mask_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our attention learns of a window by an argument."""
    config = config_of("mistral", "MistralForCausalLM")
    prove(config)
    look_up = modeling_mistral.ALL_ATTENTION_FUNCTIONS.get_interface

    class Forgetful:
        def get_interface(self, *args: Any) -> Callable[..., Any]:
            found = look_up(*args)

            def attend(*given: Any, sliding_window: int | None = None, **more: Any) -> Any:
                return found(*given, **more)

            return attend

    monkeypatch.setattr(modeling_mistral, "ALL_ATTENTION_FUNCTIONS", Forgetful())
    with pytest.raises(ConfigError, match="something else of two sequences in one batch than of each alone"):
        prove(config)


@pytest.mark.parametrize(
    ("kind", "architecture"), [("deepseek_v32", "DeepseekV32ForCausalLM"), ("axk2", "AXK2ForCausalLM")]
)
def test_an_indexer_that_chooses_keys_of_long_sequences_is_refused(kind: str, architecture: str) -> None:
    with pytest.raises(ConfigError, match=f"{architecture} is refused: it computes something else"):
        prove(config_of(kind, architecture))


def test_a_model_of_real_size_takes_little_memory_and_is_tried_once_a_start(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    real = transformers_model.try_rows
    monkeypatch.setattr(transformers_model, "try_rows", lambda *args: (tried.append(args), real(*args)))
    config = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "vocab_size": 31_999}  # 93 GB
    for _ in range(2):
        build(config, WeightTable(torch.bfloat16, torch.device("meta")))
    assert len(tried) == 1
