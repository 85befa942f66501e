"""Kernels of latent attention are compiled for an H100: those of DeepSeek fit its shared memory and registers."""

from pathlib import Path

from compile_for_hopper import SHARED, shared_bytes

LAUNCHES = """
from dataclasses import replace
from blockyard.kernels.attention.latent.head_products import head_products
from blockyard.kernels.attention.latent.latent_decode import latent_decode
from blockyard.kernels.attention.latent.latent_invariant import latent_invariant
from blockyard.kernels.attention.latent.prefill_in_pieces import prefill_in_pieces
from blockyard.kernels.attention.latent.write_latent import write_latent
from blockyard.kernels.attention.score_rules import ScoreRules
from blockyard.kernels.kv_cache.paged_kv import PagedKVMetadata

ids, starts, scales = torch.zeros(2, dtype=torch.int64), torch.tensor([0, 2], dtype=torch.int32), torch.ones(2)
rules = ScoreRules(scale=0.1)
seqs, rotation = PagedKVMetadata(ids, ids, torch.zeros(2, 4, dtype=torch.int32)), torch.ones(2, 1, 32) + 0j
for heads, plain, value in ((16, 128, 128), (128, 128, 128), (20, 192, 256)):  # the last of GLM-4.7-Flash
    query, rows = torch.zeros(2, heads, plain + 64).bfloat16(), torch.zeros(2, 576).bfloat16()
    up, q_latent = torch.zeros(heads, plain + value, 512).bfloat16(), torch.zeros(2, heads, 512).bfloat16()
    layer, out = torch.zeros(8, 1, 1, 16, 576).bfloat16(), torch.zeros(2, heads * value).bfloat16()
    latent_decode(q_latent, query[..., plain:], layer, seqs, rules, 64)
    if heads == 16:
        latent_invariant(q_latent, query[..., plain:], layer, seqs, rules, 64, False)
    if heads != 128:
        prefill_in_pieces(query, rows, layer, seqs, starts, rules, up, 64 if heads == 16 else 0, out)
    if heads == 16:
        head_products(query[..., :plain], up[:, :plain])
        head_products(q_latent, up[:, plain:].mT)
        write_latent(query, rows, layer, seqs, rotation, torch.ones(512).bfloat16(), 1e-6)
        layer = layer.to(torch.float8_e4m3fn)
        write_latent(query, rows, layer, seqs, rotation, torch.ones(512).bfloat16(), 1e-6, scales)
        latent_decode(q_latent, query[..., plain:], layer, seqs, replace(rules, kv_scales=scales), 64)
"""
TWICE = {"latent_decode_kernel"}  # with 16 heads two programs run at a time


def test_the_sizes_of_deepseek_compile_for_an_h200(tmp_path: Path) -> None:
    shared: dict[str, list[int]] = {}
    for name, size in shared_bytes(LAUNCHES, tmp_path):
        shared.setdefault(name, []).append(size)
    assert len(shared) >= 8 and max(max(sizes) for sizes in shared.values()) <= SHARED, shared
    assert all(2 * shared[name][0] <= SHARED for name in TWICE), shared
