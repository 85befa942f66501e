"""The table of attention kernels."""

from dataclasses import replace

import pytest
import torch

from blockyard.services.gpu_worker.attention.choice import (
    AttentionCase,
    AttentionKernel,
    RowKind,
    check_head_sizes,
    choose,
)
from blockyard.services.gpu_worker.layers.attention import AttentionShape
from blockyard.shared.errors import LoadError

CPU = AttentionCase(device="cpu", kind=RowKind.DECODE, kv_dtype=torch.float32, batch_invariant=False, num_rows=4)
GPU = replace(CPU, device="cuda", kv_dtype=torch.bfloat16, max_seq_len=8192)
SHORT = replace(GPU, decodes_only=True, num_rows=1)


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
        (replace(CPU, is_latent=True), AttentionKernel.TORCH),
        (replace(SHORT, is_latent=True), AttentionKernel.LATENT_DECODE),
        (replace(GPU, is_latent=True, kind=RowKind.PREFILL), AttentionKernel.LATENT_PREFILL),
        (replace(GPU, is_latent=True, batch_invariant=True), AttentionKernel.LATENT_BATCH_INVARIANT),
    ],
)
def test_kernel_of_a_case(case: AttentionCase, kernel: AttentionKernel) -> None:
    assert choose(case) is kernel


SHAPE = AttentionShape(num_heads=4, kv_heads=1, head_dim=576, scale=1.0, latent_dim=512)


@pytest.mark.parametrize("head_dim", [15, 514])
def test_head_sizes_that_no_gpu_kernel_supports(head_dim: int) -> None:
    plain = replace(SHAPE, latent_dim=None, head_dim=head_dim)
    check_head_sizes("cpu", [plain])
    with pytest.raises(LoadError, match=f"a head size of {head_dim} is not supported on a GPU"):
        check_head_sizes("cuda", [SHAPE, plain])


@pytest.mark.parametrize(("latent", "rotated"), [(513, 64), (512, 63)])
def test_rows_of_latent_attention_that_no_gpu_kernel_supports(latent: int, rotated: int) -> None:
    shape = replace(SHAPE, latent_dim=latent, head_dim=latent + rotated)
    check_head_sizes("cpu", [shape])
    with pytest.raises(LoadError, match=f"rows of {latent} and {rotated} numbers is not supported on a GPU"):
        check_head_sizes("cuda", [shape])


def test_a_dtype_that_no_kernel_supports() -> None:
    with pytest.raises(LoadError, match=r"no attention kernel for decode on cpu with a KV cache of torch\.float8"):
        choose(replace(CPU, kv_dtype=torch.float8_e4m3fn))
