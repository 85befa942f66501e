"""Dummy weights of routers, alone and in a forward pass of each kind of mixture."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from plan_driver import Driver
from tiny_models import start
from torch import Tensor

from blockyard.kernels.moe.routing import Routing, choose_experts
from blockyard.services.gpu_worker.layers.moe.routed_experts import HostExperts
from blockyard.services.gpu_worker.loading import dummy_routers
from blockyard.services.gpu_worker.loading.checkpoint import fill_dummy
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.shared.messages import Sampling

WIDTH: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "vocab_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 32,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}
LATENT = {
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "q_lora_rank": None,
    "first_k_dense_replace": 1,
}
MIXTURES: list[tuple[str, int, int, dict[str, Any]]] = [  # architecture, experts, experts of a row, other settings
    ("Qwen3MoeForCausalLM", 128, 8, {"num_experts": 128, "norm_topk_prob": True}),
    ("MixtralForCausalLM", 8, 2, {"num_local_experts": 8}),
    ("DeepseekV2ForCausalLM", 64, 6, LATENT | {"n_routed_experts": 64, "n_shared_experts": 2}),
    ("MiniMaxM2ForCausalLM", 256, 8, {"num_local_experts": 256, "use_qk_norm": True, "rotary_dim": 16}),
    ("OlmoeForCausalLM", 64, 8, {"num_experts": 64}),
]  # fmt: skip


def even(num_experts: int, top_k: int, rows: int) -> float:
    """How many experts `rows` hit on average if each is chosen equally often."""
    return num_experts * (1 - (1 - top_k / num_experts) ** rows)


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The experts [rows, top_k] of each layer and step."""
    found: list[Tensor] = []
    choose: Callable[..., tuple[Tensor, Tensor]] = HostExperts.choose

    def spy(self: HostExperts, *inputs: Tensor | None) -> tuple[Tensor, Tensor]:
        experts, weights = choose(self, *inputs)
        found.append(experts)
        return experts, weights

    monkeypatch.setattr(HostExperts, "choose", spy)
    return found


@pytest.mark.parametrize(("architecture", "num_experts", "top_k", "more"), MIXTURES, ids=[m[0] for m in MIXTURES])
def test_a_step_hits_as_many_experts_as_even_routing(
    architecture: str, num_experts: int, top_k: int, more: dict[str, Any], tmp_path: Path, chosen: list[Tensor]
) -> None:
    config = {"architectures": [architecture], "num_experts_per_tok": top_k, **WIDTH, **more}
    (tmp_path / "config.json").write_text(json.dumps(config))
    runner = start(tmp_path, load_format="dummy", max_model_len=64, max_num_seqs=64)
    rng = np.random.default_rng(1)
    for rows in (1, 8, 64):
        driver = Driver(runner, num_slots=rows)
        chosen.clear()
        for _ in range(rows):
            driver.add(rng.integers(100, 500, 6).tolist(), Sampling(temperature=0.0, max_tokens=6, ignore_eos=True))
        driver.run()
        hit = [len(experts.unique()) for experts in chosen if len(experts) == rows]
        assert len(hit) >= 10, "decode steps of all rows"
        assert np.mean(hit) == pytest.approx(even(num_experts, top_k, rows), rel=0.1)


def test_a_long_prompt_hits_all_experts_in_all_layers(tmp_path: Path, chosen: list[Tensor]) -> None:
    """With small embeddings later layers chose few, because attention had made the rows alike."""
    config = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 64, "num_experts_per_tok": 4, **WIDTH}
    config |= {"num_hidden_layers": 10, "head_dim": 128, "num_attention_heads": 8, "hidden_size": 512}
    (tmp_path / "config.json").write_text(json.dumps(config))
    driver = Driver(start(tmp_path, load_format="dummy", max_model_len=256, max_num_batched_tokens=256))
    driver.add(np.random.default_rng(2).integers(100, 500, 200).tolist(), Sampling(temperature=0.0, max_tokens=1))
    chosen.clear()
    driver.run()
    of_layers = [experts.flatten().bincount(minlength=64) for experts in chosen[:9]]  # the last layer has one row
    assert len(of_layers) == 9 and all(int(loads.sum()) == 200 * 4 for loads in of_layers)
    assert all(int((loads > 0).sum()) >= 63 and int(loads.max()) < 4 * 200 * 4 / 64 for loads in of_layers)


def test_only_untied_embeddings_of_mixtures_are_large() -> None:
    router, embedding, head = "model.layers.0.mlp.gate.weight", "model.embed_tokens.weight", "lm_head.weight"
    assert dummy_routers.wants_large_embedding([embedding, router, head])
    assert not dummy_routers.wants_large_embedding([embedding, router])
    assert not dummy_routers.wants_large_embedding([embedding, head])
    assert dummy_routers.is_embedding(embedding) and not dummy_routers.is_embedding(head)


def test_a_tenth_of_the_experts_get_half_of_the_tokens_with_skewed_routing() -> None:
    torch.manual_seed(0)
    router = torch.randn(128, 256)
    dummy_routers.settle(router, 0.02, skewed=True)
    experts, _ = choose_experts(torch.randn(4000, 256) @ router.t(), Routing(num_experts=128, top_k=8))
    assert float((experts < 13).float().mean()) == pytest.approx(0.5, abs=0.03)
    loads = experts.flatten().bincount(minlength=128)
    assert int(loads[:13].min()) > 3 * int(loads[13:].max())


def test_rows_have_one_norm() -> None:
    router = torch.randn(8, 64)
    dummy_routers.settle(router, 0.02, skewed=False)
    assert torch.allclose(router.norm(dim=-1), torch.tensor(0.16))


def test_dummy_weights_settle_routers() -> None:
    table = WeightTable(torch.float32, torch.device("cpu"))
    router, other = table.matrix("layers.0.mlp.gate.weight", 8, 64), table.matrix("layers.0.mlp.up.weight", 8, 64)
    bias = table.vector("layers.0.mlp.gate.e_score_correction_bias", 8)
    fill_dummy(table, 0, lambda done: None)
    assert torch.allclose(router.norm(dim=-1), torch.tensor(0.16)) and not bias.any()
    assert float(other.norm(dim=-1).std()) > 0.001
    fill_dummy(table, 0, lambda done: None, skewed=True)
    assert float(router[0].norm()) > 0.3 and torch.allclose(router[1:].norm(dim=-1), torch.tensor(0.16))


def test_names_of_routers() -> None:
    routers = ("mlp.gate", "block_sparse_moe.gate", "mlp.router", "router.proj", "block_sparse_moe.router.layer")
    assert all(dummy_routers.is_router(f"model.layers.0.{name}.weight") for name in routers)
    others = ("mlp.gate_proj", "mlp.shared_expert_gate", "mlp.experts.0.gate_proj", "mlp.experts.gate_up_proj")
    assert not any(dummy_routers.is_router(f"model.layers.0.{name}.weight") for name in others)
    assert dummy_routers.is_choice_bias("model.layers.0.mlp.gate.e_score_correction_bias")
    assert dummy_routers.is_choice_bias("model.layers.0.mlp.router.bias")
    assert not dummy_routers.is_choice_bias("model.layers.0.self_attn.q_proj.bias")
