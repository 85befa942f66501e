"""Attention of mixed steps through the Triton kernels, against their references."""

from dataclasses import replace

import pytest
import torch
from tiny_models import model_shape

from blockyard.kernels.attention.paged_prefill import paged_prefill_reference
from blockyard.kernels.attention.score_rules import ScoreRules
from blockyard.kernels.kv_cache.paged_kv import PagedKVMetadata
from blockyard.kernels.kv_cache.rope_write_kv import rope_write_kv_reference
from blockyard.kernels.layers.rms_norm import RMSNorm
from blockyard.services.gpu_worker.attention.metadata import AttentionMetadata
from blockyard.services.gpu_worker.attention.triton_attention import BatchInvariant, TritonAttention, build_attention
from blockyard.services.gpu_worker.kv.pool import KVPool
from blockyard.services.gpu_worker.layers.attention import AttentionShape
from blockyard.services.gpu_worker.models.interface import ModelShape
from blockyard.services.gpu_worker.step import LogitsIndices

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HEADS, KV_HEADS, DIM, SIZE = 4, 2, 16, 4
WINDOWS, SOFT_CAPS, HAVE_SINKS = (None, 6, None, 6), (None, None, 0.5, None), (False, False, False, True)


@pytest.mark.parametrize(
    ("num_decodes", "counts", "invariant"), [(0, (5, 3), False), (2, (3,), False), (2, (), False), (2, (3,), True)]
)
def test_decodes_and_prefills_in_one_step(num_decodes: int, counts: tuple[int, ...], invariant: bool) -> None:
    """All earlier tokens are in the KV cache; the last sequence no longer has a slot."""
    plain = model_shape(num_heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM, scale=DIM**-0.5, windows=WINDOWS)
    sinks = [torch.linspace(-2, 2, HEADS, device=DEVICE) if has_sinks else None for has_sinks in HAVE_SINKS]
    attention = tuple(
        replace(layer, rules=replace(layer.rules, soft_cap=cap, sinks=own))
        for layer, cap, own in zip(plain.attention, SOFT_CAPS, sinks, strict=True)
    )
    shape = replace(plain, attention=attention)
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
    pool.runs[0].normal_()
    want_memory = pool.runs[0].clone()
    seqs = PagedKVMetadata(slots.repeat_interleave(sizes).to(DEVICE), positions.to(DEVICE), tables)
    attend = build_attention(pool, AttentionMetadata(seqs, starts[num_decodes:] if counts else None, num_decodes))
    assert isinstance(attend, TritonAttention)
    assert isinstance(attend.group(0).decode, BatchInvariant) == invariant
    angles = torch.randn(len(positions), 1, DIM // 2)
    rotation = torch.polar(torch.ones_like(angles), angles).to(DEVICE)
    norm = RMSNorm(torch.randn(HEADS + KV_HEADS, DIM, device=DEVICE), 1e-6)
    for layer, it in enumerate(attention):
        qkv = torch.randn(len(positions), HEADS + 2 * KV_HEADS, DIM, device=DEVICE)
        want_qkv = qkv.clone()
        rope_write_kv_reference(want_qkv, want_memory[layer], seqs, rotation, norm.weight, norm.eps)
        want = paged_prefill_reference(want_qkv[:, :HEADS], want_memory[layer], seqs, starts, it.rules)
        torch.testing.assert_close(attend(layer, qkv, rotation, norm), want, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(pool.runs[0][layer], want_memory[layer], atol=1e-5, rtol=1e-4)


def test_layers_of_other_shapes_in_one_step() -> None:
    """A large head beside small ones, windows, and a norm of values: all layers share the metadata of the step."""
    near = AttentionShape(num_heads=4, kv_heads=2, head_dim=DIM, rules=ScoreRules(scale=1.0, window=6))
    wide = AttentionShape(num_heads=4, kv_heads=1, head_dim=512, rules=ScoreRules(scale=0.05))
    shape = ModelShape(vocab_size=10, max_positions=128, attention=(near, wide, near))
    slots = torch.tensor([2, 0, 0, 0, 1, 1])
    positions = torch.tensor([11, 3, 4, 5, 0, 1])
    tables = torch.randperm(90)[:27].view(3, 9).int().to(DEVICE)
    starts = torch.tensor([0, 1, 4, 6], dtype=torch.int32, device=DEVICE)
    pool = KVPool(shape, 90, SIZE, torch.float32, DEVICE)
    for run in pool.runs:
        run.normal_()
    seqs = PagedKVMetadata(slots.to(DEVICE), positions.to(DEVICE), tables)
    attend = build_attention(pool, AttentionMetadata(seqs, starts[1:], num_decodes=1))
    for layer, it in enumerate(shape.attention):
        all_heads = it.num_heads + 2 * it.kv_heads
        angles = torch.randn(len(positions), 1, it.head_dim // 2)
        rotation = torch.polar(torch.ones_like(angles), angles).to(DEVICE)
        norm = RMSNorm(torch.randn(all_heads, it.head_dim, device=DEVICE), 1e-6)
        qkv = torch.randn(len(positions), all_heads, it.head_dim, device=DEVICE)
        want_qkv, want_layer = qkv.clone(), pool.layers[layer].clone()
        rope_write_kv_reference(want_qkv, want_layer, seqs, rotation, norm.weight, norm.eps)
        want = paged_prefill_reference(want_qkv[:, :4], want_layer, seqs, starts, it.rules)
        torch.testing.assert_close(attend(layer, qkv, rotation, norm), want, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(pool.layers[layer], want_layer, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("invariant", [False, True])
def test_only_rows_that_need_logits_are_computed(invariant: bool) -> None:
    plain = AttentionShape(num_heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM, rules=ScoreRules(scale=0.2))
    near = replace(plain, rules=ScoreRules(scale=0.3, window=5, sinks=torch.linspace(-2, 2, HEADS, device=DEVICE)))
    shape = ModelShape(vocab_size=10, max_positions=128, attention=(plain, near))
    slots, positions = torch.tensor([1, 0, 0, 0, 0], device=DEVICE), torch.tensor([9, 5, 6, 7, 8], device=DEVICE)
    tables = torch.randperm(90)[:18].view(2, 9).int().to(DEVICE)
    starts = torch.tensor([0, 1, 5], dtype=torch.int32, device=DEVICE)
    pool = KVPool(shape, 90, SIZE, torch.float32, DEVICE, invariant)
    pool.runs[0].normal_()
    rows = torch.tensor([0, 4], device=DEVICE)
    seqs = PagedKVMetadata(slots, positions, tables)
    attend = build_attention(pool, AttentionMetadata(seqs, starts[1:], num_decodes=1))
    chosen = attend.of_rows(LogitsIndices(rows, slots[rows], positions[rows]))
    nothing = attend.of_rows(LogitsIndices(rows[:0], slots[:0], positions[:0]))
    for layer, it in enumerate(shape.attention):
        qkv, memory = torch.randn(5, HEADS + 2 * KV_HEADS, DIM, device=DEVICE), pool.layers[layer]
        want_qkv, want_memory = qkv.clone(), memory.clone()
        rope_write_kv_reference(want_qkv, want_memory, seqs, None, None, 0.0)
        want = paged_prefill_reference(want_qkv[:, :HEADS], want_memory, seqs, starts, it.rules)
        assert nothing(layer, qkv.clone()).shape == (0, HEADS * DIM)
        torch.testing.assert_close(memory, want_memory)
        torch.testing.assert_close(chosen(layer, qkv), want[rows], atol=1e-5, rtol=1e-4)
