"""Times the small kernels between linear layers, of Llama-3.1-8B's sizes: norms, gate, rotation with KV write; and the
norm of bge-base."""

from functools import partial

import torch

from blockyard.kernels.kv_cache.paged_kv import PagedKVMetadata
from blockyard.kernels.kv_cache.rope_write_kv import rope_write_kv
from blockyard.kernels.layers.act_mul import act_mul
from blockyard.kernels.layers.add_layer_norm import add_layer_norm
from blockyard.kernels.layers.add_rms_norm import add_rms_norm
from blockyard.kernels.layers.norm_add_norm import norm_add_norm
from blockyard.kernels.layers.rotate_halves import rotate_halves
from blockyard.services.gpu_worker.bench.row import Row, row
from blockyard.services.gpu_worker.bench.timing import DEVICE, copies, graph_seconds

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM = 4096, 14336, 32, 8, 128
BLOCK_SIZE = 16
ENCODER_HIDDEN, ENCODER_ROWS = 768, (16, 512, 8192)
DTYPE = torch.bfloat16
ROWS = (1, 64, 256, 2048)


def measure() -> list[Row]:
    with torch.inference_mode(), torch.device(DEVICE):
        measured = (_norm, _norms_behind, _gate, partial(_rope, normed=False), partial(_rope, normed=True), _halves)
        return [
            *(measure_rows(rows) for rows in ROWS for measure_rows in measured),
            *(_layer_norm(rows) for rows in ENCODER_ROWS),
        ]


def _norm(rows: int) -> Row:
    weight = torch.randn(HIDDEN).to(DTYPE)
    num_bytes = 4 * rows * HIDDEN * 2  # residual and delta in, residual and result out
    pairs = [torch.randn(2, rows, HIDDEN).to(DTYPE) for _ in range(copies(num_bytes))]
    seconds = graph_seconds([partial(add_rms_norm, residual, delta, weight, 1e-5) for residual, delta in pairs])
    return row("residual add + RMSNorm", f"{rows} x {HIDDEN}", seconds, num_bytes)


def _layer_norm(rows: int) -> Row:
    """Times the norm of a sum that is not kept."""
    weight, bias = torch.randn(2, ENCODER_HIDDEN).to(DTYPE)
    num_bytes = 3 * rows * ENCODER_HIDDEN * 2  # residual and delta in, result out
    pairs = [torch.randn(2, rows, ENCODER_HIDDEN).to(DTYPE) for _ in range(copies(num_bytes))]
    calls = [partial(add_layer_norm, x, delta, weight, bias, 1e-12, keeps_sum=False) for x, delta in pairs]
    return row("residual add + LayerNorm", f"{rows} x {ENCODER_HIDDEN}", graph_seconds(calls), num_bytes)


def _norms_behind(rows: int) -> Row:
    weight = torch.randn(HIDDEN).to(DTYPE)
    num_bytes = 4 * rows * HIDDEN * 2  # residual and output of a sublayer in, residual and result out
    pairs = [torch.randn(2, rows, HIDDEN).to(DTYPE) for _ in range(copies(num_bytes))]
    calls = [partial(norm_add_norm, residual, x, weight, 1e-5, [weight]) for residual, x in pairs]
    return row("RMSNorm + residual add + RMSNorm", f"{rows} x {HIDDEN}", graph_seconds(calls), num_bytes)


def _gate(rows: int) -> Row:
    num_bytes = 3 * rows * INNER * 2
    given = [torch.randn(rows, 2 * INNER).to(DTYPE) for _ in range(copies(num_bytes))]
    seconds = graph_seconds([partial(act_mul, x) for x in given])
    return row("SiLU and mul", f"{rows} x {2 * INNER}", seconds, num_bytes)


def _rope(rows: int, normed: bool) -> Row:
    """Times rotation and KV write. Each row belongs to another sequence."""
    width = HEADS + 2 * KV_HEADS
    num_bytes = rows * (width + HEADS + 2 * KV_HEADS) * HEAD_DIM * 2
    given = [torch.randn(rows, width, HEAD_DIM).to(DTYPE) for _ in range(copies(num_bytes))]
    layer = torch.zeros(rows, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM, dtype=DTYPE)
    tables = torch.randperm(rows).int()[:, None].contiguous()
    seqs = PagedKVMetadata(torch.arange(rows), torch.randint(0, BLOCK_SIZE, (rows,)), tables)
    angles = torch.randn(rows, 1, HEAD_DIM // 2)
    rotation = torch.polar(torch.ones_like(angles), angles)
    weight = torch.randn(HEADS + KV_HEADS, HEAD_DIM).to(DTYPE) if normed else None
    seconds = graph_seconds([partial(rope_write_kv, x, layer, seqs, rotation, weight, 1e-6) for x in given])
    name = "norm of q and k + rotation + KV write" if normed else "rotation + KV write"
    return row(name, f"{rows} x {width} x {HEAD_DIM}", seconds, num_bytes)


def _halves(rows: int) -> Row:
    """Times the rotation of q and k in the output of their product, as classes of transformers have it."""
    width, rotated = HEADS + 2 * KV_HEADS, HEADS + KV_HEADS
    num_bytes = rows * (2 * rotated + 2) * HEAD_DIM * 2  # q and k in and out, cos and sin in
    angles = torch.randn(1, rows, HEAD_DIM)
    cos, sin = angles.cos().to(DTYPE), angles.sin().to(DTYPE)
    calls = []
    for _ in range(copies(num_bytes)):
        heads = torch.randn(1, rows, width, HEAD_DIM).to(DTYPE).transpose(1, 2)
        calls.append(partial(rotate_halves, heads[:, :HEADS], heads[:, HEADS:rotated], cos, sin, in_place=True))
    return row("rotation of halves", f"{rows} x {rotated} x {HEAD_DIM}", graph_seconds(calls), num_bytes)
