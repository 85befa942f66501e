"""The table of attention kernels."""

from dataclasses import replace

import pytest
import torch

from blockyard.services.gpu_worker.attention.choice import (
    AttentionCase,
    AttentionKernel,
    RowKind,
    check_latent,
    choose,
)
from blockyard.shared.errors import LoadError

CPU = AttentionCase(
    device="cpu", kind=RowKind.DECODE, head_dim=15, kv_dtype=torch.float32, batch_invariant=False, num_rows=4
)
GPU = replace(CPU, device="cuda", head_dim=128, kv_dtype=torch.bfloat16, max_seq_len=8192)
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
    ],
)
def test_kernel_of_a_case(case: AttentionCase, kernel: AttentionKernel) -> None:
    assert choose(case) is kernel


@pytest.mark.parametrize("head_dim", [15, 514])
def test_head_sizes_that_no_gpu_kernel_supports(head_dim: int) -> None:
    with pytest.raises(LoadError, match=f"a head size of {head_dim} is not supported on a GPU"):
        choose(replace(GPU, head_dim=head_dim))


def test_latent_attention_is_computed_on_the_cpu_alone() -> None:
    check_latent("cpu", 512)
    check_latent("cuda", None)
    with pytest.raises(LoadError, match=r"latent attention \(kv_lora_rank\) is not supported on a GPU; --device cpu"):
        check_latent("cuda", 512)


def test_a_dtype_that_no_kernel_supports() -> None:
    with pytest.raises(LoadError, match=r"no attention kernel for decode on cpu with a KV cache of torch\.float8"):
        choose(replace(CPU, kv_dtype=torch.float8_e4m3fn))
