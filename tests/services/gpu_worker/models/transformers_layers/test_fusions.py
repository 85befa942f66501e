"""Modules of transformers' classes that are replaced, and look-alikes that compute something else and are not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_checkpoint import LLAMA
from torch import Tensor, nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.helium import modeling_helium
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from blockyard.kernels.layers.rms_norm import RMSNorm
from blockyard.services.gpu_worker.layers.activations import ACTIVATIONS
from blockyard.services.gpu_worker.layers.fused_ops import TorchOps
from blockyard.services.gpu_worker.models.transformers_layers.gates import find_activation
from blockyard.services.gpu_worker.models.transformers_layers.norms import NormKind, NormModule, find_norm
from blockyard.services.gpu_worker.models.transformers_layers.rotations import HalvesRotation, install, rotates_halves
from blockyard.services.gpu_worker.models.transformers_model import trace_layers

SIZE = 24


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make().eval()


def test_all_that_llama_has_is_found() -> None:
    config = LLAMA | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    layers = trace_layers(config, torch.float32)
    found, count = layers.fusions, config["num_hidden_layers"]
    assert len(found.joint) == 2 * count and len(found.norms) == 2 * count + 1
    own = "model.layers.1"
    assert tuple(f"{own}.self_attn.{name}_proj" for name in "qkv") in found.joint
    assert found.gates == {f"model.layers.{i}.mlp": "silu" for i in range(count)}
    assert found.rotations == {f"model.layers.{i}.self_attn": True for i in range(count)}
    behind = [*(f"model.layers.{i}.input_layernorm" for i in range(1, count)), "model.norm"]
    after = {f"model.layers.{i}.self_attn.o_proj": f"model.layers.{i}.post_attention_layernorm" for i in range(count)}
    assert found.sums == after | {f"model.layers.{i}.mlp.down_proj": behind[i] for i in range(count)}
    assert found.norms["model.norm"] == NormKind(LLAMA["hidden_size"], 1e-6, unit_offset=False)
    assert len(layers.calls) == 7 * count and layers.calls[-1] == f"model.layers.{count - 1}.mlp.down_proj"


@pytest.mark.parametrize(
    ("kind", "fields", "norms", "rotations"),
    [
        ("gemma", {"head_dim": 16}, 7, [True] * 3),  # norms with unit offset
        ("helium", {"head_dim": 16}, 7, []),  # rotates pairs side by side
        ("phi3", {"pad_token_id": 0}, 7, [True] * 3),  # one layer of q, k and v, and one of gate and up
        ("exaone4", {}, 13, [False] * 3),  # norms of q and k: rotated are new tensors
        ("arcee", {"head_dim": 16}, 7, [True] * 3),  # no gate
    ],
)
def test_what_other_classes_have_is_found(kind: str, fields: dict[str, Any], norms: int, rotations: list[bool]) -> None:
    config = LLAMA | {"architectures": ["Any"], "model_type": kind} | fields
    found = trace_layers(config, torch.float32).fusions
    assert len(found.norms) == norms and list(found.rotations.values()) == rotations
    assert {one.unit_offset for one in found.norms.values()} == {kind == "gemma"}
    gates = {"gemma": {"gelu_tanh"}, "arcee": set()}.get(kind, {"silu"})
    assert set(found.gates.values()) == gates and len(found.joint) == {"arcee": 3, "phi3": 0}.get(kind, 6)


class OtherEps(LlamaRMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.weight * hidden_states * torch.rsqrt(hidden_states.pow(2).mean(-1, keepdim=True) + 1e-5)


class EpsOutside(LlamaRMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return (
            self.weight * hidden_states / (hidden_states.pow(2).mean(-1, keepdim=True).sqrt() + self.variance_epsilon)
        )


class Centered(LlamaRMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        x = hidden_states - hidden_states.mean(-1, keepdim=True)
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)


class OverTokens(LlamaRMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        mean = hidden_states.pow(2).mean((-1, -2), keepdim=True)
        return self.weight * hidden_states * torch.rsqrt(mean + self.variance_epsilon)


class Exponential(LlamaRMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states) * self.weight


class WithResidual(LlamaRMSNorm):
    def forward(self, hidden_states: Tensor, residual: Tensor | None = None) -> Tensor:
        return super().forward(hidden_states if residual is None else hidden_states + residual)


class Float32Out(LlamaRMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states.float())


class InPlace(LlamaRMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states.copy_(super().forward(hidden_states))


@pytest.mark.parametrize(
    "kind", [OtherEps, EpsOutside, Centered, OverTokens, Exponential, WithResidual, Float32Out, InPlace]
)
def test_other_norms_stay(kind: type[nn.Module]) -> None:
    assert find_norm(on_meta(lambda: LlamaRMSNorm(SIZE, 1e-6))) is not None
    assert find_norm(on_meta(lambda: kind(SIZE, 1e-6))) is None


def test_norms_with_more_to_them_stay() -> None:
    norm = on_meta(lambda: LlamaRMSNorm(SIZE, 1e-6))
    norm.register_forward_hook(lambda *_: None)
    layer_norm = on_meta(lambda: nn.LayerNorm(SIZE))
    no_bias = on_meta(lambda: nn.LayerNorm(SIZE, bias=False))
    buffered = on_meta(lambda: LlamaRMSNorm(SIZE, 1e-6))
    buffered.register_buffer("scale", torch.ones(1, device="meta"))
    assert [find_norm(one) for one in (norm, layer_norm, no_bias, buffered)] == [None] * 4


@pytest.mark.parametrize("unit_offset", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_takes_the_place_of_theirs(unit_offset: bool, dtype: torch.dtype) -> None:
    theirs = (GemmaRMSNorm if unit_offset else LlamaRMSNorm)(SIZE, 1e-3).to(dtype)
    nn.init.normal_(theirs.weight)
    kind = find_norm(theirs)
    assert kind == NormKind(SIZE, 1e-3, unit_offset)
    weight = theirs.weight.detach()
    ours = NormModule(RMSNorm(weight.float() + 1 if unit_offset else weight, 1e-3), SIZE, TorchOps())
    heads = torch.randn(1, 5, 3, SIZE, dtype=dtype).transpose(1, 2)
    for x in (torch.randn(1, 3, SIZE, dtype=dtype), torch.randn(4, 2 * SIZE, dtype=dtype)[None, :, SIZE:], heads):
        tolerance = {"atol": 0.05, "rtol": 0.02} if dtype == torch.bfloat16 else {}
        torch.testing.assert_close(ours(hidden_states=x), theirs(x), **tolerance)


class Gated(nn.Module):
    """A look-alike whose middle is given."""

    def __init__(self, middle: Callable[[Tensor, Tensor], Tensor], bias: bool = False) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(SIZE, 40, bias=bias), nn.Linear(SIZE, 40, bias=bias)
        self.down_proj = nn.Linear(40, SIZE, bias=bias)
        self.middle = middle

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.middle(self.gate_proj(x), self.up_proj(x)))


class Joined(nn.Module):
    def __init__(self, middle: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Linear(SIZE, 80), nn.Linear(40, SIZE)
        self.middle = middle

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.middle(*self.gate_up_proj(x).chunk(2, -1)))


class Scaled(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * super().forward(x)


class OtherInput(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.middle(self.gate_proj(x), self.up_proj(2 * x)))


class Twice(Gated):
    def forward(self, x: Tensor) -> Tensor:
        self.up_proj(x)
        return super().forward(x)


class Weighted(Gated):
    def __init__(self, middle: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__(middle)
        self.weight = nn.Parameter(torch.ones(40))


def silu(gate: Tensor, up: Tensor) -> Tensor:
    return nn.functional.silu(gate) * up


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gates_are_told_apart(activation: str) -> None:
    act = ACTIVATIONS[activation]
    assert find_activation(on_meta(lambda: Gated(lambda gate, up: act(gate.clone()) * up))) == activation
    assert find_activation(on_meta(lambda: Gated(lambda gate, up: gate * act(up.clone())))) is None


@pytest.mark.parametrize(
    "make",
    [
        lambda: Gated(lambda gate, up: nn.functional.elu(gate) * up),
        lambda: Gated(lambda gate, up: torch.sigmoid(gate) * up),
        lambda: Gated(lambda gate, up: silu(gate, up) + up),
        lambda: Gated(lambda gate, up: silu(gate.clamp(max=7.0), up)),
        lambda: Gated(lambda gate, up: silu(gate, up.clamp(-7.0, 7.0))),
        lambda: Gated(lambda gate, up: gate * torch.sigmoid(1.702 * gate) * up),
        lambda: Scaled(silu),
        lambda: OtherInput(silu),
        lambda: Twice(silu),
        lambda: Weighted(silu),
        lambda: Joined(lambda gate, up: silu(up, gate)),
        lambda: Joined(lambda gate, up: silu(gate, up + 1)),
    ],
)
def test_other_gates_stay(make: Callable[[], nn.Module]) -> None:
    assert (
        find_activation(on_meta(lambda: Gated(silu, bias=True)))
        == find_activation(on_meta(lambda: Joined(silu)))
        == "silu"
    )
    assert find_activation(on_meta(make)) is None


def rotated_by(function: Callable[..., Any]) -> nn.Module:
    """An attention module whose file has this function."""
    names: dict[str, Any] = {"nn": nn, "apply_rotary_pos_emb": function}
    source = """
class Attention(nn.Module):
    def forward(self, q, k, cos, sin, *, scale=2.0):
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        return q * scale, k
"""
    exec(source, names)
    made: nn.Module = names["Attention"]()
    return made


def swapped(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    return modeling_llama.apply_rotary_pos_emb(q, k, sin, cos, unsqueeze_dim)


def backwards(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    return modeling_llama.apply_rotary_pos_emb(q, k, cos, -sin, unsqueeze_dim)


def q_alone(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    return modeling_llama.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim)[0], k


def partial(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """The rotation of GPT-NeoX: the first numbers of a head."""
    dim = cos.shape[-1]
    turned = modeling_llama.apply_rotary_pos_emb(q[..., :dim], k[..., :dim], cos, sin, unsqueeze_dim)
    return torch.cat((turned[0], q[..., dim:]), -1), torch.cat((turned[1], k[..., dim:]), -1)


def last_part(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    dim = q.shape[-1] - cos.shape[-1]
    turned = modeling_llama.apply_rotary_pos_emb(q[..., dim:], k[..., dim:], cos, sin, unsqueeze_dim)
    return torch.cat((q[..., :dim], turned[0]), -1), torch.cat((k[..., :dim], turned[1]), -1)


@pytest.mark.parametrize(
    ("function", "is_ours"),
    [
        (modeling_llama.apply_rotary_pos_emb, True),
        (partial, True),
        (modeling_helium.apply_rotary_pos_emb, False),
        (swapped, False),
        (backwards, False),
        (q_alone, False),
        (last_part, False),
        (modeling_llama.LlamaAttention, False),
    ],
)
def test_rotations_are_told_apart(function: Callable[..., Any], is_ours: bool) -> None:
    assert rotates_halves(rotated_by(function)) == is_ours


def test_a_rotation_is_of_one_module_alone() -> None:
    ours, theirs = rotated_by(partial), rotated_by(partial)
    calls: list[bool] = []

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, in_place: bool) -> tuple[Tensor, Tensor]:
        calls.append(in_place)
        return TorchOps().rotate_halves(q, k, cos, sin, in_place)

    install(ours, rotate, [])
    q, k, cos, sin = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 3, 8), torch.randn(1, 3, 6), torch.randn(1, 3, 6)
    before = q.clone()
    for one, other in zip(ours(q, k, cos, sin), theirs(q, k, cos, sin), strict=True):
        torch.testing.assert_close(one, other)
    assert calls == [False] and torch.equal(q, before)
    assert theirs.forward.__globals__["apply_rotary_pos_emb"] is partial
    ours(q.double(), k.double(), cos, sin)  # another dtype: the original
    rotation = HalvesRotation(partial, rotate, [])
    rotation(q.transpose(1, 2), k.transpose(1, 2), cos, sin, unsqueeze_dim=2)
    assert calls == [False]
