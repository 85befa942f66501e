"""A model without a runner, and its hidden states of packed sequences."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from model_logits import hidden_in_chunks
from torch import Tensor

from blockyard.services.gpu_worker.attention.packed_attention import CpuPackedProduct, PackedAttention, PackedProduct
from blockyard.services.gpu_worker.kv.pool import KVPool
from blockyard.services.gpu_worker.loading import checkpoint
from blockyard.services.gpu_worker.loading.hf_config import read_config
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.models.interface import Model
from blockyard.services.gpu_worker.models.registry import find_family
from blockyard.services.gpu_worker.step import Step


def load_model(
    folder: Path,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    overrides: str = "{}",
    model_impl: str = "auto",
) -> Model:
    settings = read_config(folder, overrides)
    table = WeightTable(dtype, torch.device(device))
    model = find_family(settings, model_impl)(settings, table)
    with torch.inference_mode():
        checkpoint.load(table, folder, "auto", [], 0, lambda done: None)
        model.prepare(model.shape.max_positions)
    return model


def run_packed(
    model: Model, texts: Sequence[list[int]], token_types: Sequence[list[int]] | None = None
) -> list[Tensor]:
    """Hidden states [tokens, hidden] of each sequence, computed in one step."""
    lengths = np.array([len(text) for text in texts])
    types = None
    if token_types is not None:
        types = torch.tensor([one for text in token_types for one in text], device=model.table.device)
    device = model.table.device
    if device.type == "cuda":
        from blockyard.services.gpu_worker.execution.cuda.pooled_attention import TritonPackedProduct

        starts = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=device)
        product: PackedProduct = TritonPackedProduct(starts, int(lengths.max()))
    else:
        product = CpuPackedProduct(lengths)
    step = Step(
        torch.tensor([one for text in texts for one in text], device=device),
        torch.cat([torch.arange(n) for n in lengths.tolist()]).to(device),
        PackedAttention(model.shape.attention, product),
        token_types=types,
    )
    with torch.inference_mode():
        return list(model.forward(step).clone().split(lengths.tolist()))


def run_causal(model: Model, ids: list[int], chunks: list[int]) -> Tensor:
    """Hidden states [tokens, hidden] of a decoder, computed in chunks over a KV pool of its own."""
    pool = KVPool(model.shape, 64, 8, model.table.dtype, model.table.device, False)
    return hidden_in_chunks(model, pool, ids, chunks)
