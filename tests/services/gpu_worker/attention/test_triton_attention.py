"""Attention of mixed steps through the Triton kernels, against their references."""

from functools import partial
from typing import Any

import pytest
import torch

from blockyard.kernels.attention.paged_prefill import paged_prefill_reference
from blockyard.kernels.kv_cache.paged_kv import PagedKVMetadata
from blockyard.kernels.kv_cache.rope_write_kv import rope_write_kv_reference
from blockyard.kernels.layers.linear_skinny import linear_skinny
from blockyard.kernels.layers.rms_norm import RMSNorm
from blockyard.services.gpu_worker.attention.triton_attention import InvariantAttention, TritonOps, mixed_attention
from blockyard.services.gpu_worker.kv.pool import KVPool
from blockyard.services.gpu_worker.layers.fused_ops import Ops, TorchOps
from blockyard.services.gpu_worker.layers.linear import Linear
from blockyard.services.gpu_worker.models.decoder import ModelShape

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HEADS, KV_HEADS, DIM, SIZE = 4, 2, 16, 4
WINDOWS = (None, 6)


@pytest.mark.parametrize(
    ("num_decodes", "counts", "invariant"), [(0, (5, 3), False), (2, (3,), False), (2, (), False), (2, (3,), True)]
)
def test_decodes_and_prefills_in_one_step(num_decodes: int, counts: tuple[int, ...], invariant: bool) -> None:
    """Everything that was there before is known, the last sequence has no slot any more."""
    shape = ModelShape(
        vocab_size=10,
        num_layers=len(WINDOWS),
        num_heads=HEADS,
        kv_heads=KV_HEADS,
        head_dim=DIM,
        max_positions=64,
        scale=DIM**-0.5,
        windows=WINDOWS,
    )
    sizes = torch.tensor([1] * num_decodes + list(counts), dtype=torch.int64)
    torch.manual_seed(len(sizes))
    befores = torch.arange(len(sizes)) * 5
    slots = torch.randperm(len(sizes) + 1)[: len(sizes)]
    slots[-1] = -1
    first = sizes.cumsum(0) - sizes
    positions = torch.arange(int(sizes.sum())) + (befores - first).repeat_interleave(sizes)
    tables = torch.randperm(90)[: (len(sizes) + 1) * 9].view(-1, 9).int().to(DEVICE)
    starts = torch.cat((first, sizes.sum()[None])).int().to(DEVICE)
    pool = KVPool(shape, 90, SIZE, torch.float32, DEVICE, invariant)
    pool.memory.normal_()
    want_memory = pool.memory.clone()
    seqs = PagedKVMetadata(slots.repeat_interleave(sizes).to(DEVICE), positions.to(DEVICE), tables)
    attend = mixed_attention(
        pool, seqs.slots, seqs.positions, tables, starts[num_decodes:] if counts else None, num_decodes
    )
    assert isinstance(attend, InvariantAttention) == invariant
    angles = torch.randn(len(positions), 1, DIM // 2)
    rotation = torch.polar(torch.ones_like(angles), angles).to(DEVICE)
    norm = RMSNorm(torch.randn(HEADS + KV_HEADS, DIM, device=DEVICE), 1e-6)
    for layer, window in enumerate(WINDOWS):
        qkv = torch.randn(len(positions), HEADS + 2 * KV_HEADS, DIM, device=DEVICE)
        want_qkv = qkv.clone()
        rope_write_kv_reference(want_qkv, want_memory[layer], seqs, rotation, norm.weight, norm.eps)
        want = paged_prefill_reference(
            want_qkv[:, :HEADS], want_memory[layer], seqs, starts, shape.scale, window, soft_cap=None
        )
        torch.testing.assert_close(attend(layer, qkv, rotation, norm), want, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(pool.memory[layer], want_memory[layer], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("is_fused", [False, True])
def test_products_with_what_is_around_them(is_fused: bool) -> None:
    """A layer's four products, in kernels of their own and with norm, gate and sum taken in: as plain torch."""
    rows, hidden, inner = 2, 32, 48
    torch.manual_seed(3)
    shapes = {"norm": (40, hidden), "add": (hidden, 40), "gate": (hidden, inner)}
    linears = {around: Linear(torch.randn(*shape, device=DEVICE), around=around) for around, shape in shapes.items()}
    norm = RMSNorm(torch.randn(hidden, device=DEVICE), 1e-6)
    residual, delta = torch.randn(2, rows, hidden, device=DEVICE)
    gate_up = torch.randn(rows, 2 * inner, device=DEVICE)

    def run(ops: Ops) -> list[torch.Tensor]:
        total = residual + delta
        out = [ops.enter(linears["norm"], residual.clone(), delta, norm), ops.enter(linears["norm"], total, None, norm)]
        for around, x in (("add", out[1].clone()), ("gate", gate_up.clone())):
            left = ops.leave(linears[around], x, total, gated=around == "gate")
            assert (left is None) == (is_fused and isinstance(ops, TritonOps))
            out.append(total.clone() if left is None else total.add_(left).clone())
        return out

    want = run(TorchOps())
    calls = []
    if is_fused:
        for linear in linears.values():
            assert linear.weight is not None
            tiles = {"out_tile": 4, "tile": 32, "warps": 1, "pdl": False}
            product = partial(linear_skinny, weight=linear.weight, bias=None, **tiles)

            def fused(x: torch.Tensor, product: Any = product, **around: Any) -> torch.Tensor:
                calls.append(around)
                return product(x, **around)

            linear.use({}, fused={rows: fused})
    for got, one in zip(run(TritonOps()), want, strict=True):
        torch.testing.assert_close(got, one, atol=1e-4, rtol=1e-4)
    assert len(calls) == 3 * is_fused, "what is still to be added has to be added before a norm"
    for linear in linears.values():
        linear.wrap(lambda product: product)
        assert linear.fused(rows) is None, "a weight that is fetched for each product is not read by another kernel"
