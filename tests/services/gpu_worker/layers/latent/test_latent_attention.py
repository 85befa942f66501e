"""Latent attention in pieces over the paged cache against a plain float64 computation of each head."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from blockyard.services.gpu_worker.attention.cpu_metadata import CpuMetadataBuilder
from blockyard.services.gpu_worker.kv.pool import KVPool
from blockyard.services.gpu_worker.layers.latent.latent_attention import (
    NORM_EPS,
    LatentAttention,
    LatentSizes,
    latent_shape,
)
from blockyard.services.gpu_worker.layers.linear import LinearLayers
from blockyard.services.gpu_worker.layers.norm import NoNorm
from blockyard.services.gpu_worker.layers.rope_parameters import RopeParameters
from blockyard.services.gpu_worker.layers.rotary import RotaryEmbedding
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.models.interface import ModelShape

HIDDEN, TOKENS, SIZE = 40, 37, 4
SIZES = LatentSizes(num_heads=3, plain_dim=6, rotated_dim=4, value_dim=10, latent_dim=16, query_latent_dim=12)
YARN = RopeParameters(rope_type="yarn", factor=4.0, original_max_position_embeddings=16, mscale=0.7, mscale_all_dim=1.1)
CPU = torch.device("cpu")


class Rig:
    def __init__(self, sizes: LatentSizes, rope: RopeParameters, batch_invariant: bool) -> None:
        torch.manual_seed(2)
        table, heads = WeightTable(torch.float32, CPU), sizes.num_heads
        self.sizes, self.shape = sizes, latent_shape(sizes, rope)
        self.attention = LatentAttention(LinearLayers(table, {}), "a", 0, HIDDEN, sizes)
        query = ("q_proj", HIDDEN) if sizes.query_latent_dim is None else ("q_b_proj", sizes.query_latent_dim)
        shapes = {
            query[0]: (heads * sizes.query_dim, query[1]),
            "kv_a_proj_with_mqa": (sizes.row_dim, HIDDEN),
            "kv_b_proj": (heads * (sizes.plain_dim + sizes.value_dim), sizes.latent_dim),
            "kv_a_layernorm": (sizes.latent_dim,),
            "o_proj": (HIDDEN, heads * sizes.value_dim),
        }
        if sizes.query_latent_dim is not None:
            shapes |= {"q_a_proj": (query[1], HIDDEN), "q_a_layernorm": (query[1],)}
        self.weights = {name: torch.randn(shape) * shape[-1] ** -0.5 for name, shape in shapes.items()}
        for name, weight in self.weights.items():
            if "norm" in name:
                weight.add_(1)
            table.put(f"a.{name}.weight", weight)
        table.check_complete()
        self.attention.prepare()
        for linear in self.attention.linears():
            linear.prepare()
            if batch_invariant:
                linear.make_batch_invariant()
        self.rotary = RotaryEmbedding(rope, sizes.rotated_dim, 64)
        self.rotary.prepare(64, CPU, torch.float32)
        model = ModelShape(vocab_size=10, max_positions=64, attention=(self.shape,))
        self.builder = CpuMetadataBuilder(KVPool(model, 20, SIZE, torch.float32, CPU, batch_invariant))
        self.x = torch.randn(TOKENS, HIDDEN)

    def run(self, begin: int, end: int) -> Tensor:
        """The values of these tokens, before the output projection: [tokens, heads * value_dim]."""
        positions, table = np.arange(begin, end), np.arange(20)[::-1].copy()
        attend = self.builder.attention(
            table[positions // SIZE],
            positions % SIZE,
            table[None],
            np.array([end - begin]),
            np.array([end]),
            np.array([1]),
            int(end - begin == 1),
        )
        where = torch.from_numpy(positions)
        return self.attention.attend(self.x[begin:end], None, NoNorm(), self.rotary(where), attend)

    def plain(self) -> Tensor:
        """Decompresses K and V of each head, in float64."""
        sizes, heads, angles = self.sizes, self.sizes.num_heads, self.rotary(torch.arange(TOKENS)).angles
        assert angles is not None
        weights, x = {name: weight.double() for name, weight in self.weights.items()}, self.x.double()

        def norm(y: Tensor, name: str) -> Tensor:
            return y * (y.square().mean(-1, keepdim=True) + NORM_EPS).rsqrt() * weights[name]

        def rotate(y: Tensor) -> Tensor:
            pairs = torch.view_as_complex(y.contiguous().unflatten(-1, (-1, 2)))
            return torch.view_as_real(pairs * angles.to(torch.complex128)).flatten(-2)

        if sizes.query_latent_dim is None:
            q = x @ weights["q_proj"].T
        else:
            q = norm(x @ weights["q_a_proj"].T, "q_a_layernorm") @ weights["q_b_proj"].T
        q = q.view(TOKENS, heads, -1)
        rows = x @ weights["kv_a_proj_with_mqa"].T
        latent, shared = rows[:, : sizes.latent_dim], rotate(rows[:, None, sizes.latent_dim :])
        both = (norm(latent, "kv_a_layernorm") @ weights["kv_b_proj"].T).view(TOKENS, heads, -1)
        keys = torch.cat((both[..., : sizes.plain_dim], shared.expand(-1, heads, -1)), -1)
        queries = torch.cat((q[..., : sizes.plain_dim], rotate(q[..., sizes.plain_dim :])), -1)
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * self.shape.rules.scale
        seen = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
        probs = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", probs, both[..., sizes.plain_dim :]).flatten(1)


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("rope", [RopeParameters(), YARN], ids=["default", "yarn"])
@pytest.mark.parametrize("query_latent_dim", [None, 12])
def test_prefills_and_decodes(query_latent_dim: int | None, rope: RopeParameters, batch_invariant: bool) -> None:
    rig = Rig(replace(SIZES, query_latent_dim=query_latent_dim), rope, batch_invariant)
    want, whole = rig.plain(), rig.run(0, TOKENS)
    assert float(want.std()) > 0.1
    torch.testing.assert_close(whole.double(), want, atol=1e-5, rtol=1e-4)
    spans = [(0, 20), (20, 21), (21, 22), (22, 30), *((at, at + 1) for at in range(30, TOKENS))]
    pieces = torch.cat([rig.run(*span) for span in spans])
    torch.testing.assert_close(pieces.double(), want, atol=1e-5, rtol=1e-4)
    if batch_invariant:
        assert torch.equal(pieces, whole)


def test_the_scale_has_yarns_factor_twice() -> None:
    plain, scaled = latent_shape(SIZES, RopeParameters()), latent_shape(SIZES, YARN)
    assert plain.rules.scale == 10**-0.5 and plain.kept == (1, 1, 20) and plain.latent_dim == 16
    assert scaled.rules.scale == pytest.approx(plain.rules.scale * 1.1524923797**2)
