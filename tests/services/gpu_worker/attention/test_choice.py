"""The table of attention kernels."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from blockyard.kernels.attention.score_rules import ScoreRules
from blockyard.services.gpu_worker.attention.choice import (
    AttentionCase,
    AttentionKernel,
    RowKind,
    check_head_sizes,
    choose,
)
from blockyard.services.gpu_worker.layers.attention import AttentionShape
from blockyard.shared.errors import LoadError

PLAIN = AttentionShape(num_heads=4, kv_heads=2, head_dim=128, rules=ScoreRules(scale=1.0))
LATENT = AttentionShape(num_heads=4, kv_heads=1, head_dim=576, rules=ScoreRules(scale=1.0), latent_dim=512)
CPU = AttentionCase(
    device="cpu", kind=RowKind.DECODE, kv_dtype=torch.float32, batch_invariant=False, layer=PLAIN, num_rows=4
)
GPU = replace(CPU, device="cuda", kv_dtype=torch.bfloat16, max_seq_len=8192, block_size=16)
SHORT = replace(GPU, decodes_only=True, num_rows=1)
HOPPER = replace(GPU, kind=RowKind.PREFILL, runs_hopper=True)
HOPPER_LATENT = replace(GPU, layer=LATENT, runs_hopper=True)


def with_rules(case: AttentionCase, head_dim: int = 128, **rules: Any) -> AttentionCase:
    return replace(case, layer=replace(PLAIN, head_dim=head_dim, rules=ScoreRules(scale=1.0, **rules)))


@pytest.mark.parametrize(
    ("case", "kernel"),
    [
        (CPU, AttentionKernel.TORCH),
        (replace(CPU, kind=RowKind.PREFILL), AttentionKernel.TORCH),
        (replace(CPU, batch_invariant=True), AttentionKernel.TORCH_BATCH_INVARIANT),
        (GPU, AttentionKernel.SPLIT_KV_DECODE),
        (replace(GPU, kv_dtype=torch.float8_e4m3fn), AttentionKernel.SPLIT_KV_DECODE),
        (replace(GPU, kind=RowKind.PREFILL), AttentionKernel.PAGED_PREFILL),
        (replace(GPU, kind=RowKind.PREFILL, batch_invariant=True), AttentionKernel.TRITON_BATCH_INVARIANT),
        (SHORT, AttentionKernel.FUSED_DECODE),
        (replace(SHORT, num_rows=0), AttentionKernel.SPLIT_KV_DECODE),
        (replace(SHORT, num_rows=2), AttentionKernel.SPLIT_KV_DECODE),
        (replace(SHORT, max_seq_len=8193), AttentionKernel.SPLIT_KV_DECODE),
        (replace(SHORT, decodes_only=False), AttentionKernel.SPLIT_KV_DECODE),
        (replace(SHORT, batch_invariant=True), AttentionKernel.TRITON_BATCH_INVARIANT),
        (replace(CPU, layer=LATENT), AttentionKernel.TORCH),
        (replace(SHORT, layer=LATENT), AttentionKernel.LATENT_DECODE),
        (replace(GPU, layer=LATENT, kind=RowKind.PREFILL), AttentionKernel.LATENT_PREFILL),
        (replace(GPU, layer=LATENT, batch_invariant=True), AttentionKernel.LATENT_BATCH_INVARIANT),
        (HOPPER, AttentionKernel.PAGED_PREFILL_HOPPER),
        (replace(HOPPER, runs_hopper=False), AttentionKernel.PAGED_PREFILL),
        (replace(HOPPER, batch_invariant=True), AttentionKernel.TRITON_BATCH_INVARIANT),
        (replace(HOPPER, kind=RowKind.DECODE), AttentionKernel.SPLIT_KV_DECODE),
        (replace(HOPPER, block_size=8), AttentionKernel.PAGED_PREFILL),
        (replace(HOPPER, kv_dtype=torch.float16), AttentionKernel.PAGED_PREFILL),
        (replace(HOPPER, kv_dtype=torch.float8_e4m3fn), AttentionKernel.PAGED_PREFILL),
        (with_rules(HOPPER, window=100), AttentionKernel.PAGED_PREFILL_HOPPER),
        (with_rules(HOPPER, window=100, chunked=True), AttentionKernel.PAGED_PREFILL),
        (with_rules(HOPPER, head_dim=64), AttentionKernel.PAGED_PREFILL_HOPPER),
        (with_rules(replace(HOPPER, max_seq_len=511), head_dim=64), AttentionKernel.PAGED_PREFILL),
        (with_rules(replace(HOPPER, max_seq_len=512), head_dim=64), AttentionKernel.PAGED_PREFILL_HOPPER),
        (with_rules(HOPPER, head_dim=64, window=511), AttentionKernel.PAGED_PREFILL),
        (with_rules(HOPPER, head_dim=96), AttentionKernel.PAGED_PREFILL),
        (with_rules(replace(HOPPER, max_seq_len=1), head_dim=256), AttentionKernel.PAGED_PREFILL_HOPPER),
        (with_rules(HOPPER, head_dim=512), AttentionKernel.PAGED_PREFILL),
        (HOPPER_LATENT, AttentionKernel.LATENT_DECODE_HOPPER),
        (replace(HOPPER_LATENT, kind=RowKind.PREFILL), AttentionKernel.LATENT_PREFILL),
        (replace(HOPPER_LATENT, kv_dtype=torch.float8_e4m3fn), AttentionKernel.LATENT_DECODE),
        (replace(HOPPER_LATENT, block_size=8), AttentionKernel.LATENT_DECODE),
        (replace(HOPPER_LATENT, layer=replace(LATENT, head_dim=544)), AttentionKernel.LATENT_DECODE),
        (replace(HOPPER_LATENT, batch_invariant=True), AttentionKernel.LATENT_BATCH_INVARIANT),
    ],
)
def test_kernel_of_a_case(case: AttentionCase, kernel: AttentionKernel) -> None:
    assert choose(case) is kernel


@pytest.mark.parametrize("head_dim", [15, 514])
def test_head_sizes_that_no_gpu_kernel_supports(head_dim: int) -> None:
    plain = replace(PLAIN, head_dim=head_dim)
    check_head_sizes("cpu", [plain])
    with pytest.raises(LoadError, match=f"a head size of {head_dim} is not supported on a GPU"):
        check_head_sizes("cuda", [LATENT, plain])


@pytest.mark.parametrize(("latent", "rotated"), [(513, 64), (512, 63)])
def test_rows_of_latent_attention_that_no_gpu_kernel_supports(latent: int, rotated: int) -> None:
    shape = replace(LATENT, latent_dim=latent, head_dim=latent + rotated)
    check_head_sizes("cpu", [shape])
    with pytest.raises(LoadError, match=f"rows of {latent} and {rotated} numbers is not supported on a GPU"):
        check_head_sizes("cuda", [shape])


def test_a_dtype_that_no_kernel_supports() -> None:
    with pytest.raises(LoadError, match=r"no attention kernel for decode on cpu with a KV cache of torch\.float8"):
        choose(replace(CPU, kv_dtype=torch.float8_e4m3fn))
