"""The shares of all ranks together are the whole: matrices, biases and products, however checkpoints store them."""

from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from blockyard.kernels.attention.score_rules import ScoreRules
from blockyard.kernels.layers.rms_norm import RMSNorm
from blockyard.kernels.moe.routing import Routing
from blockyard.services.gpu_worker.layers.attention import (
    Attention,
    AttentionOptions,
    AttentionShape,
    JoinedQKV,
    KeysAsValues,
    QKVProjection,
    SeparateQKV,
)
from blockyard.services.gpu_worker.layers.latent.latent_attention import LatentAttention, LatentSizes
from blockyard.services.gpu_worker.layers.linear import Linear, LinearLayers
from blockyard.services.gpu_worker.layers.mlp import MLP, GatedMLP
from blockyard.services.gpu_worker.layers.moe.expert_weights import ExpertWeights, separate_experts, stacked_experts
from blockyard.services.gpu_worker.layers.moe.routed_experts import HostExperts, RoutedExperts
from blockyard.services.gpu_worker.loading.checkpoint import fill_dummy
from blockyard.services.gpu_worker.loading.linear_spec import part
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.parallel.shares import Shard
from blockyard.services.gpu_worker.quantization.dense import UnquantizedExperts
from blockyard.services.gpu_worker.quantization.kept.form import KeptExperts
from blockyard.services.gpu_worker.quantization.method import Fusion
from blockyard.shared.errors import ConfigError

T = TypeVar("T")
CPU = torch.device("cpu")
MXFP4 = {"quantization_config": {"quant_method": "mxfp4"}}
HIDDEN = 12


def built(make: Callable[[LinearLayers], T], size: int, config: dict[str, object] | None = None) -> Iterator[T]:
    """The model on one rank, and then on each rank of `size`, all with the same checkpoint."""
    stored: dict[str, Tensor] = {}
    for shard in [Shard(), *(Shard(rank, size) for rank in range(size))]:
        table = WeightTable(torch.float64, CPU, shard=shard)
        made = make(LinearLayers(table, config or {}))
        for i, (name, place) in enumerate(table.places.items()):
            if name not in stored:
                random = torch.Generator().manual_seed(i)
                stored[name] = torch.randn(place.shape, generator=random, dtype=torch.float64)
                if torch.uint8 in place.stored:
                    low, high = (125, 129) if name.endswith("_scales") else (0, 256)
                    stored[name] = torch.randint(low, high, place.shape, generator=random, dtype=torch.uint8)
            table.put(name, stored[name])
        table.check_complete()
        table.finish()
        yield made


def outputs_of(linear: Linear, shard: Shard) -> list[int]:
    """The output features that a rank has, as of the whole layer."""
    found, start = list[int](), 0
    for one in linear.spec.parts:
        found += [start + row for own in linear.spec.rows(one, shard) for row in own]
        start += one.size
    return found


def check_outputs(whole: Linear, ranks: list[Linear]) -> None:
    """Each rank has the features that its spec says, and all of them are on a rank."""
    x, seen = torch.randn(3, whole.shape[0], dtype=torch.float64), set[int]()
    for rank, linear in enumerate(ranks):
        own = outputs_of(linear, Shard(rank, len(ranks)))
        torch.testing.assert_close(linear(x), whole(x)[:, own])
        assert linear.shape == (whole.shape[0], len(own))
        seen.update(own)
    assert seen == set(range(whole.shape[1]))


def check_sum(whole: Linear, ranks: list[Linear]) -> None:
    """The partial sums of all ranks are the whole product, with its bias once."""
    x, inputs = torch.randn(3, whole.shape[0], dtype=torch.float64), whole.spec.inputs
    parts = [linear(x[:, list(inputs.share(Shard(rank, len(ranks))))]) for rank, linear in enumerate(ranks)]
    torch.testing.assert_close(torch.stack(parts).sum(0), whole(x))


class Sizes:
    """Heads that can be divided among a number of ranks."""

    def __init__(self, size: int, kv_heads: int, group: int, half_dim: int) -> None:
        self.size, self.kv_heads, self.heads, self.head_dim = size, kv_heads, kv_heads * group, 2 * half_dim


@st.composite
def heads(draw: st.DrawFn) -> Sizes:
    kv_heads, group = draw(st.integers(1, 6)), draw(st.integers(1, 7))
    size = draw(st.integers(1, min(kv_heads * group, 8)))  # also more than there are K/V heads
    return Sizes(size, kv_heads, group, draw(st.integers(1, 2)))


PROJECTIONS = (
    SeparateQKV(),
    SeparateQKV(bias=True),
    KeysAsValues(bias=True),
    JoinedQKV(name="qkv", bias=True),
    JoinedQKV(name="qkv", bias=True, by_group=True),
    JoinedQKV(name="qkv", bias=True, transposed=True),
)


@settings(deadline=None)
@given(heads(), st.sampled_from(PROJECTIONS), st.booleans())
def test_heads(sizes: Sizes, qkv: QKVProjection, transposed: bool) -> None:
    shape = AttentionShape(
        num_heads=sizes.heads, kv_heads=sizes.kv_heads, head_dim=sizes.head_dim, rules=ScoreRules(scale=1.0)
    )
    options = AttentionOptions(qkv=qkv, out_bias=True, out_transposed=transposed)
    whole, *ranks = built(lambda layers: Attention(layers, "a", 0, HIDDEN, shape, options), sizes.size)
    check_outputs(whole.qkv, [one.qkv for one in ranks])
    check_sum(whole.out, [one.out for one in ranks])
    for rank, one in enumerate(ranks):  # a query head is where its key and value are
        own = {feature // sizes.head_dim for feature in outputs_of(one.qkv, Shard(rank, sizes.size))}
        queries = {head for head in own if head < sizes.heads}
        kv_heads = {sizes.heads + head * sizes.kv_heads // sizes.heads for head in queries}
        assert own == queries | kv_heads | {head + sizes.kv_heads for head in kv_heads}
        own_shape = shape.share(Shard(rank, sizes.size))
        assert (own_shape.num_heads, own_shape.kv_heads) == (len(queries), len(kv_heads))
        groups = [head * sizes.kv_heads // sizes.heads for head in sorted(queries)]
        assert len({groups.count(group) for group in groups}) == 1  # as attention kernels divide them


@settings(deadline=None)
@given(st.integers(1, 5), st.integers(5, 11), st.booleans(), st.booleans())
def test_rows_one_by_one_may_be_divided_unevenly(size: int, inner: int, joined: bool, bias: bool) -> None:
    name = "gate_up" if joined else None
    whole, *ranks = built(lambda layers: GatedMLP(layers, "m", HIDDEN, inner, bias=bias, joined=name), size)
    check_outputs(whole.gate_up, [one.gate_up for one in ranks])
    check_sum(whole.down, [one.down for one in ranks])
    x = torch.randn(3, HIDDEN, dtype=torch.float64)
    torch.testing.assert_close(torch.stack([one.apply(x) for one in ranks]).sum(0), whole.apply(x))


@settings(deadline=None)
@given(st.integers(1, 5), st.integers(5, 11), st.booleans())
def test_without_a_gate(size: int, inner: int, transposed: bool) -> None:
    whole, *ranks = built(
        lambda layers: MLP(layers, "up", "down", HIDDEN, inner, "silu", bias=True, transposed=transposed), size
    )
    x = torch.randn(3, HIDDEN, dtype=torch.float64)
    torch.testing.assert_close(torch.stack([one.apply(x) for one in ranks]).sum(0), whole.apply(x))


@settings(deadline=None)
@given(st.sampled_from([1, 2, 4]), st.sampled_from([None, 6]), st.booleans())
def test_latents_are_on_all_ranks(size: int, query_latent_dim: int | None, bias: bool) -> None:
    sizes = LatentSizes(
        num_heads=4, plain_dim=6, rotated_dim=2, value_dim=5, latent_dim=8, query_latent_dim=query_latent_dim
    )
    whole, *ranks = built(lambda layers: LatentAttention(layers, "a", 0, HIDDEN, sizes, bias=bias), size)
    for of_whole, *of_ranks in zip(*(one.linears() for one in (whole, *ranks)), strict=True):
        check = check_sum if of_whole is whole.out else check_outputs
        check(of_whole, of_ranks)
    torch.testing.assert_close(torch.cat([one.up.weight for one in ranks]), whole.up.weight)


def of_one(weights: ExpertWeights, expert: int, x: Tensor) -> Tensor:
    gate, up = weights.gate_up.linear(expert).apply(x).chunk(2, -1)
    return weights.down.linear(expert).apply(F.silu(gate) * up)


EXPERTS: dict[str, Callable[[LinearLayers, int, int], ExpertWeights]] = {
    "separate": lambda layers, hidden, inner: separate_experts(layers, "e", 3, hidden, inner),
    "separate, with biases": lambda layers, hidden, inner: separate_experts(layers, "e", 3, hidden, inner, bias=True),
    "stacked": lambda layers, hidden, inner: stacked_experts(layers, "gate_up", "down", 3, hidden, inner),
    "transposed": lambda layers, hidden, inner: stacked_experts(
        layers, "gate_up", "down", 3, hidden, inner, transposed=True
    ),
    "in pairs": lambda layers, hidden, inner: stacked_experts(
        layers, "gate_up", "down", 3, hidden, inner, transposed=True, in_pairs=True, bias=True
    ),
}


@pytest.mark.parametrize(("kind", "config"), [*((kind, None) for kind in EXPERTS), ("in pairs", MXFP4)])
@pytest.mark.parametrize("size", [2, 4])
def test_experts(kind: str, config: dict[str, object] | None, size: int) -> None:
    hidden, inner = (32, 128) if config else (6, 12)
    whole, *ranks = built(lambda layers: EXPERTS[kind](layers, hidden, inner), size, config)
    own = ranks[0].gate_up
    if config:
        assert isinstance(own, KeptExperts) and own.shape == (hidden, 2 * inner // size)
    else:
        assert isinstance(own, UnquantizedExperts) and own.weight.shape == (3, 2 * inner // size, hidden)
    x = torch.randn(5, hidden, dtype=torch.float64)
    for expert in range(3):
        parts = torch.stack([of_one(one, expert, x) for one in ranks])
        torch.testing.assert_close(parts.sum(0), of_one(whole, expert, x))


@pytest.mark.parametrize("size", [2, 3])
def test_dummy_weights_are_shares_of_one_model_s(size: int) -> None:
    shape = AttentionShape(num_heads=6, kv_heads=2, head_dim=4, rules=ScoreRules(scale=1.0))

    def make(shard: Shard) -> tuple[Attention, GatedMLP]:
        layers = LinearLayers(WeightTable(torch.float64, CPU, shard=shard), {})
        options = AttentionOptions(qkv=JoinedQKV(name="qkv"), out_transposed=True)
        made = Attention(layers, "a", 0, HIDDEN, shape, options), GatedMLP(layers, "m", HIDDEN, 12, joined="gate_up")
        fill_dummy(layers.table, 3, lambda done: None)
        return made

    whole, *ranks = [make(shard) for shard in (Shard(), *(Shard(rank, size) for rank in range(size)))]
    check_outputs(whole[0].qkv, [one.qkv for one, _ in ranks])
    check_sum(whole[0].out, [one.out for one, _ in ranks])
    check_outputs(whole[1].gate_up, [one.gate_up for _, one in ranks])
    check_sum(whole[1].down, [one.down for _, one in ranks])


def test_spread_experts_that_cannot_be_are_refused() -> None:
    table = WeightTable(torch.float64, CPU, shard=Shard(0, 4))
    table.spreads_experts = True
    with pytest.raises(ConfigError, match="3 experts cannot be on 4 ranks"):
        EXPERTS["separate"](LinearLayers(table, {}), 6, 12)


def test_blocks_of_inputs_are_not_cut() -> None:
    with pytest.raises(ConfigError, match="no whole groups of 32"):
        list(built(lambda layers: EXPERTS["in pairs"](layers, 32, 96), 4, MXFP4))
    blocks = {"quantization_config": {"quant_method": "fp8", "weight_block_size": (8, 8)}}
    table = WeightTable(torch.float32, torch.device("meta"), shard=Shard(0, 4))
    error = (
        r"--tensor-parallel-size 4: e\.0\.down_proj: inputs 0 to 3, which a rank has, are no whole groups of 8; with "
        "--enable-expert-parallel a rank has whole experts"
    )
    with pytest.raises(ConfigError, match=error):
        EXPERTS["separate"](LinearLayers(table, blocks), 8, 16)
    table.spreads_experts = True
    with pytest.raises(ConfigError, match="3 experts cannot be on 4 ranks"):
        EXPERTS["separate"](LinearLayers(table, blocks), 8, 16)


def test_more_ranks_than_query_heads_are_refused() -> None:
    shape = AttentionShape(num_heads=4, kv_heads=2, head_dim=8, rules=ScoreRules(scale=1.0))
    with pytest.raises(ConfigError, match="--tensor-parallel-size 5 is more than the 4 query heads"):
        shape.share(Shard(0, 5))


def test_a_partial_sum_is_not_added_to_the_residual_by_its_own_kernel() -> None:
    whole, *ranks = built(lambda layers: GatedMLP(layers, "m", HIDDEN, 8), 2)
    assert (whole.gate_up.fusion, whole.down.fusion) == (Fusion.NORM, Fusion.GATED_ADD)
    assert {(one.gate_up.fusion, one.down.fusion) for one in ranks} == {(Fusion.NORM, Fusion.NONE)}


@pytest.mark.parametrize("size", [1, 2])
def test_experts_of_a_rank_are_not_added_to_the_residual(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their sum is a part of one; whole sums may be added where they are made."""
    given: list[Tensor | None] = []

    def forward(self: HostExperts, x: Tensor, *of: object) -> Tensor:
        given.append(of[4])  # type: ignore[arg-type]
        return torch.zeros_like(x)

    def make(layers: LinearLayers) -> RoutedExperts:
        router = layers.make([part("gate", 3)], HIDDEN)
        return RoutedExperts(router, EXPERTS["separate"](layers, HIDDEN, 8), Routing(num_experts=3, top_k=2))

    monkeypatch.setattr(HostExperts, "forward", forward)
    layer, residual = list(built(make, size))[-1], torch.zeros(2, HIDDEN, dtype=torch.float64)
    norm = RMSNorm(torch.ones(HIDDEN, dtype=torch.float64), 1e-6)
    layer.forward(residual, None, norm)
    assert [one is residual for one in given] == [size == 1]
