"""Attention of heads of 512 numbers is compiled for an H100: its tiles fit the shared memory."""

from pathlib import Path

from compile_for_hopper import SHARED, shared_bytes

LAUNCHES = """
from blockyard.kernels.attention.batch_invariant import batch_invariant_attention
from blockyard.kernels.attention.fused_decode import SplitSemaphores, fused_decode
from blockyard.kernels.attention.paged_decode import paged_decode
from blockyard.kernels.attention.paged_prefill import paged_prefill
from blockyard.kernels.attention.score_rules import ScoreRules
from blockyard.kernels.kv_cache.paged_kv import PagedKVMetadata

ids, starts = torch.zeros(2, dtype=torch.int64), torch.tensor([0, 1, 2], dtype=torch.int32)
rules = ScoreRules(scale=1.0)
seqs = PagedKVMetadata(ids, ids, torch.zeros(2, 4, dtype=torch.int32))
heads, kv_heads, dim = 16, 2, 512  # of Gemma 4 26B-A4B
q, layer = torch.zeros(2, heads, dim).bfloat16(), torch.zeros(8, 2, kv_heads, 16, dim).bfloat16()
out = torch.zeros(2, heads * dim).bfloat16()
qkv = torch.zeros(2, heads + 2 * kv_heads, dim).bfloat16()
fused_decode(qkv, layer, seqs, None, None, rules, 4096, SplitSemaphores(2 * heads, torch.device("cpu")))
paged_decode(q, layer, seqs, rules, 4096)
paged_prefill(q, layer, seqs, starts, rules, 64, out)
batch_invariant_attention(q, layer, seqs, starts, rules, 4096, out, True)
"""
PROGRAMS = {"paged_decode_kernel": 4, "paged_prefill_kernel": 1}  # that run at a time on a multiprocessor


def test_heads_of_512_numbers_compile_for_an_h100(tmp_path: Path) -> None:
    shared = dict(shared_bytes(LAUNCHES, tmp_path))
    assert len(shared) >= 5
    assert all(PROGRAMS.get(name, 1) * size <= SHARED for name, size in shared.items()), shared
