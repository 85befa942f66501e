"""Classes of transformers divided among ranks, which are processes: the logits are those of the class on one."""

from pathlib import Path
from typing import Any

import pytest
import rank_logits
import torch
from tiny_classes import save_tiny, tiny_config
from transformers import Qwen2Config
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from blockyard.kernels.attention.score_rules import ScoreRules
from blockyard.services.gpu_worker.layers.attention import AttentionShape, head_rows
from blockyard.services.gpu_worker.loading.linear_spec import Rows
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.models.interface import Model
from blockyard.services.gpu_worker.models.transformers_layers.tensor_parallel import Division, TensorParallelPlan
from blockyard.services.gpu_worker.models.transformers_model import build
from blockyard.services.gpu_worker.parallel.shares import Shard
from blockyard.shared.errors import ConfigError

KINDS = [
    "arcee",  # an MLP without a gate
    "gemma",  # a tied head, and embeddings with a factor
    "phi3",  # q, k and v joined in one matrix; gate and up, too
    "olmo2",  # norms of all of q and k, which ranks join
    "gpt_neox",  # q, k and v of a head side by side; biases; the class has another name of the head
    "minicpm3",  # heads of q, k and v made of latents
    "granitemoeshared",  # experts alone are divided
    "mixtral",  # checkpoints have experts one by one
    "aria_text",  # stacks of experts as [experts, in, out]
]
UNEVEN = ["exaone4", "phi3", "glm4_moe"]  # of four heads, with two of K and V
META = torch.device("meta")


def differences(size: int, kinds: list[str], root: Path, *flags: str) -> dict[str, float]:
    """Runs all classes on one group of ranks. Returns the largest difference of logits by name."""
    expected = dict[str, torch.Tensor]()
    for kind in kinds:
        theirs = save_tiny(kind, root / kind)
        with torch.no_grad():
            expected[kind] = theirs(torch.tensor([rank_logits.prompt()]), use_cache=False).logits[0]
    rank_logits.run(size, root / "group", [root / kind for kind in kinds], "--transformers", *flags)
    return {kind: float((torch.load(root / kind / rank_logits.OUTPUT) - expected[kind]).abs().max()) for kind in kinds}


def test_two_ranks(tmp_path: Path) -> None:
    found = differences(2, KINDS, tmp_path)
    assert {kind: size for kind, size in found.items() if size > 1e-4} == {}


def test_three_ranks_have_unlike_shares(tmp_path: Path) -> None:
    """Of heads, of the vocabulary and of whole experts."""
    found = differences(3, UNEVEN, tmp_path, "--spread")
    assert {kind: size for kind, size in found.items() if size > 1e-4} == {}


def declared(kind: str, shard: Shard, **changed: Any) -> Model:
    config = tiny_config(kind, **changed).to_dict()
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
    return build(config | {"architectures": [name], "model_type": kind}, WeightTable(torch.float32, META, shard=shard))


def test_a_rank_has_its_share_of_weights_and_kv() -> None:
    whole, own = (declared("qwen2", Shard(0, size)) for size in (1, 2))
    divided = {name: place.target.shape for name, place in own.table.places.items()}
    wholes = {name: place.target.shape for name, place in whole.table.places.items()}
    assert {name for name, shape in wholes.items() if divided[name] == shape} == {
        "model.norm.weight",
        *(f"model.layers.{i}.{norm}_layernorm.weight" for i in range(2) for norm in ("input", "post_attention")),
    }
    [layer, _], [all_heads, _] = own.shape.attention, whole.shape.attention
    assert (layer.num_heads, layer.kv_heads, layer.model_kv_heads) == (2, 1, all_heads.kv_heads)


def test_joined_outputs_leave_all_heads_to_each_rank() -> None:
    layer = declared("phi3", Shard(1, 2)).shape.attention[0]
    assert (layer.num_heads, layer.kv_heads, layer.first_kv_head, layer.model_kv_heads) == (4, 2, 0, 2)


def test_outputs_of_attention_are_divided_by_heads() -> None:
    shape = AttentionShape(num_heads=4, kv_heads=2, head_dim=16, rules=ScoreRules(scale=1.0))
    plan = TensorParallelPlan({"attention.x": Division.OUTPUTS}, attention={"attention": shape})
    queries, three = head_rows(shape)[0], Shard(0, 3)
    assert plan.outputs("attention.x", 64, three) == queries
    assert plan.outputs("attention.x", 32, three) == Rows(32, 2), "K or V"
    assert plan.outputs("attention.x", 128, three) == Rows(128, 4, 2), "q and a gate of each number"
    assert plan.outputs("attention.x", 4, three) == Rows(4, 4, 2), "a gate of each head"
    assert plan.outputs("attention.x", 40, Shard(0, 2)).own_units(Shard(1, 2)) == range(2, 4)
    for size, shard in ((40, three), (30, Shard(0, 2))):
        with pytest.raises(ConfigError, match=f"attention.x, whose {size} outputs are not whole heads"):
            plan.outputs("attention.x", size, shard)


@pytest.mark.parametrize(
    ("kind", "size", "plan", "said"),
    [
        ("biogpt", 2, None, "BioGptForCausalLM is refused: it has no plan that divides its layers among ranks"),
        ("qwen2", 5, None, "--tensor-parallel-size 5 is more than the 4 query heads"),
        ("qwen2", 2, {"norm": "sequence_parallel"}, "has model.norm as sequence_parallel, which is not built"),
        ("qwen2", 2, {"norm": "colwise"}, "has model.norm as colwise, which is not built for Qwen2RMSNorm"),
        ("qwen2", 2, {"layers.*.mlp.up_proj": "colwise"}, "it does not run with a rank's share of its layers"),
        ("gemma3n_text", 2, None, "layers.0.mlp.down_proj gets other numbers of a rank than of the whole"),
    ],
)
def test_what_cannot_be_divided_is_refused_by_name(
    kind: str, size: int, plan: dict[str, str] | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if plan is not None:
        monkeypatch.setattr(Qwen2Config, "base_model_tp_plan", plan)
    with pytest.raises(ConfigError, match=said):
        declared(kind, Shard(0, size))
