"""The kernels that a step of a GPU launches, in their order: fused where a family and the number of rows allow it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import BASE, LLAMA
from torch import Tensor

from blockyard.kernels.layers.rms_norm import RMSNorm
from blockyard.services.gpu_worker.layers import triton_ops
from blockyard.services.gpu_worker.layers.fused_ops import OPS
from blockyard.services.gpu_worker.layers.linear import Linear
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.models.registry import find_family
from blockyard.services.gpu_worker.quantization.method import Fusion
from blockyard.services.gpu_worker.step import Attend, LatentRows, LogitsIndices, Step

OPT = BASE | {"ffn_dim": 96, "max_position_embeddings": 64}
BERT = BASE | {"intermediate_size": 96, "id2label": {str(i): str(i) for i in range(211)}}
CONFIGS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": LLAMA,
    "MistralForCausalLM": LLAMA,
    "Qwen2ForCausalLM": LLAMA,
    "Qwen3ForCausalLM": LLAMA | {"head_dim": 16},
    "GraniteForCausalLM": LLAMA | {"residual_multiplier": 0.2},  # no kernel for its factors
    "Phi3ForCausalLM": LLAMA,
    "SmolLM3ForCausalLM": LLAMA,
    "OPTForCausalLM": OPT,
    "BertForTokenClassification": BERT,
    "Gemma3ForCausalLM": LLAMA | {"head_dim": 16},
    "Gemma4ForCausalLM": LLAMA | {"head_dim": 16, "global_head_dim": 16, "hidden_size_per_layer_input": 0},
}
PLAIN = ["add_norm", "linear 128", "attend", "linear 64", "add_norm", "linear 192", "silu", "linear 64"]
FUSED = ["norm+linear 128", "attend", "linear 64+add", "norm+linear 192", "silu+linear 64+add"]
NORMS_BEHIND = ["attend", "linear 64", "norm_add_norm", "linear 192", "gelu_tanh", "linear 64", "norm_add_norm"]
OPT_LAYER = ["linear 192", "attend", "linear 64", "add_layer_norm", "linear 96", "linear 64", "add_layer_norm"]
FUSED_OPT_LAYER = ["linear 192", "attend", "linear 64+add", "linear 96", "linear 64+add"]  # the norms are torch's
BERT_LAYER = ["linear 192", "attend", "linear 64", "norm of sum", "linear 96", "linear 64", "norm of sum"]


class Launches:
    """Records what would be launched instead of computing it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        monkeypatch.setattr(triton_ops, "add_rms_norm", self._add_rms_norm)
        monkeypatch.setattr(triton_ops, "add_layer_norm", self._add_layer_norm)
        monkeypatch.setattr(triton_ops, "norm_add_norm", self._norm_add_norm)
        monkeypatch.setattr(triton_ops, "act_mul", self._act_mul)
        monkeypatch.setitem(OPS, "cpu", triton_ops.TritonOps)

    def install(self, linear: Linear, rows: int, is_fused: bool) -> None:
        out = linear.shape[1]

        def product(x: Tensor) -> Tensor:
            self.names.append(f"linear {out}")
            return x.new_zeros(len(x), out)

        def fused(x: Tensor, norm: RMSNorm | None = None, gated: bool = False, add_to: Tensor | None = None) -> Tensor:
            before, after = ["norm"] * (norm is not None) + ["silu"] * gated, ["add"] * (add_to is not None)
            self.names.append("+".join([*before, f"linear {out}", *after]))
            return x.new_zeros(len(x), out)

        linear.use({}, product, {rows: fused} if is_fused and linear.fusion is not Fusion.NONE else {})

    def __call__(self, layer: int, qkv: Tensor, rotation: Tensor | None = None, norm: RMSNorm | None = None) -> Tensor:
        """Implements `Attend`."""
        self.names.append("attend")
        return qkv.new_zeros(len(qkv), 64)

    def latent(self, layer: int, query: Tensor, rotation: Tensor | None, latent: LatentRows) -> Tensor:
        raise NotImplementedError

    def of_rows(self, indices: LogitsIndices) -> Attend:
        raise NotImplementedError

    def _add_rms_norm(self, residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        self.names.append("add_norm")
        return residual

    def _add_layer_norm(
        self, residual: Tensor, delta: Tensor, weight: Tensor, bias: Tensor, eps: float, keeps_sum: bool = True
    ) -> Tensor:
        self.names.append("add_layer_norm" if keeps_sum else "norm of sum")
        return residual

    def _norm_add_norm(
        self, residual: Tensor, x: Tensor, weight: Tensor, eps: float, then: list[Tensor], **_: Any
    ) -> list[Tensor]:
        self.names.append("norm_add_norm")
        return [residual] * len(then)

    def _act_mul(self, x: Tensor, activation: str) -> Tensor:
        self.names.append(activation)
        return x[:, : x.shape[1] // 2]


@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize("name", CONFIGS)
def test_launches_of_a_step(name: str, is_fused: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also the products of one to eight rows of a model that is not tuned yet: separate kernels."""
    launches = Launches(monkeypatch)
    config = {"architectures": [name], **CONFIGS[name]}
    model = find_family(config)(config, WeightTable(torch.float32, torch.device("cpu")))
    model.prepare(64)
    for linear in model.linears():
        launches.install(linear, 2, is_fused)
    tokens = torch.tensor([3, 4])
    model.logits(model.forward(Step(tokens, torch.tensor([0, 1]), launches)))
    layers = config["num_hidden_layers"]
    if name == "OPTForCausalLM":
        expected = (FUSED_OPT_LAYER if is_fused else OPT_LAYER) * layers
    elif name == "BertForTokenClassification":
        expected = BERT_LAYER * layers
    elif name in ("Gemma3ForCausalLM", "Gemma4ForCausalLM"):
        qkv = ["norm+linear 128"] if is_fused else ["add_norm", "linear 128"]
        expected = [*[*qkv, *NORMS_BEHIND] * layers, "add_norm"]
    else:
        expected = (FUSED if is_fused else PLAIN) * layers + ["add_norm"]
    assert launches.names == [*expected, "linear 211"]
