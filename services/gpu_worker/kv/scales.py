"""Finds the scales of a KV cache in 8 bits: from the checkpoint, a file, or the first prompt of a request."""

from pathlib import Path

import msgspec
import torch
from torch import Tensor

from blockyard.services.gpu_worker.kv.pool import KVPool, LargestOfRanks
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.shared.config.services.worker import WorkerConfig
from blockyard.shared.errors import ConfigError, LoadError

KV_DTYPES = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
# names in checkpoints, after the layer's prefix; kv_scale is for both K and V
_K_NAMES = (
    "self_attn.k_scale",
    "self_attn.kv_scale",
    "self_attn.k_proj.k_scale",
    "self_attn.k_proj.output_scale",
    "self_attn.attn.k_scale",
)
_V_NAMES = (
    "self_attn.v_scale",
    "self_attn.v_proj.v_scale",
    "self_attn.v_proj.output_scale",
    "self_attn.attn.v_scale",
)
# of queries and of probabilities, which stay 16 bits
_UNUSED_NAMES = (
    "self_attn.q_scale",
    "self_attn.q_proj.q_scale",
    "self_attn.q_proj.output_scale",
    "self_attn.attn.q_scale",
    "self_attn.prob_scale",
    "self_attn.attn.prob_scale",
)


class _KVCache(msgspec.Struct):
    scaling_factor: dict[int, dict[int, float]]  # by rank, then by layer


class _File(msgspec.Struct):
    kv_cache: _KVCache


def pick_kv_dtype(name: str, dtype: torch.dtype, has_8_bit_kv: bool) -> torch.dtype:
    """The dtype of --kv-cache-dtype. has_8_bit_kv: see `Backend`. Raises ConfigError."""
    if name == "auto":
        return dtype
    if not has_8_bit_kv:
        raise ConfigError(f"--kv-cache-dtype {name}: 8 bits need a GPU; on CPU leave it at auto")
    if dtype == torch.float32:
        raise ConfigError(f"--kv-cache-dtype {name}: activations are float32; --dtype bfloat16 goes with 8 bits")
    return KV_DTYPES[name]


def are_in_checkpoint(config: WorkerConfig) -> bool:
    return config.kv_cache_dtype != "auto" and config.kv_scales_path is None and not config.calculate_kv_scales


def place_scales(table: WeightTable, num_layers: int, is_wanted: bool) -> Tensor:
    """[layers, 2] float32, of K and V, which loading the checkpoint fills; 1 where it has none.

    num_layers: of the model; a pipeline stage places its own.
    """
    layers = range(num_layers) if table.stage is None else table.stage.layers
    scales = torch.ones((len(layers), 2), dtype=torch.float32, device=table.device)
    for place, layer in enumerate(layers):
        for name in _UNUSED_NAMES:
            table.ignore(f"model.layers.{layer}.{name}")
        for names, target in ((_K_NAMES, scales[place, 0]), (_V_NAMES, scales[place, 1])):
            for name in names:
                if not is_wanted:
                    table.ignore(f"model.layers.{layer}.{name}")
                elif name.endswith("kv_scale"):
                    table.place_scalar(f"model.layers.{layer}.{name}", scales[place])
                else:
                    table.place_scalar(f"model.layers.{layer}.{name}", target)
    return scales


def read_scales(file: Path, scales: Tensor, first_layer: int, num_layers: int) -> None:
    """Reads a file into [layers, 2]; K and V of a layer share a scale. num_layers: of the model, whose `first_layer` is
    the first here. Raises LoadError."""
    try:
        ranks = msgspec.json.decode(file.read_bytes(), type=_File, strict=False).kv_cache.scaling_factor
    except (OSError, msgspec.MsgspecError) as e:
        raise LoadError(f"--quantization-param-path {file}: not a file of KV scales: {e}") from e
    found = ranks.get(0, {})
    if sorted(found) != list(range(num_layers)):
        raise LoadError(
            f"--quantization-param-path {file}: rank 0 has scales of {len(found)} layers, the model has {num_layers}"
        )
    values = torch.tensor([found[first_layer + layer] for layer in range(len(scales))], dtype=torch.float32)
    scales.copy_(values[:, None].expand(-1, 2))


def set_pool_scales(
    pool: KVPool,
    scales: Tensor,
    config: WorkerConfig,
    of_stages: LargestOfRanks | None = None,
    of_heads: LargestOfRanks | None = None,
) -> list[str]:
    """Sets the scales of a pool in 8 bits. scales: of the checkpoint. of_stages: the largest of the ranks of all
    pipeline stages, which call it, see `RankGroup.largest`; None: there is one stage. of_heads: of those that divide
    the heads of a layer; None: one rank has all. Returns notes. Raises LoadError."""
    if pool.scales is None:
        return []
    kind = str(pool.dtype).removeprefix("torch.")
    if config.calculate_kv_scales:
        pool.measure_next_prefill(of_heads)
        return [f"KV scales: {kind}, from the first prompt of more than one token"]
    if config.kv_scales_path is not None:
        read_scales(Path(config.kv_scales_path), scales, pool.shape.first_layer, len(pool.shape.windows))
    pool.set_scales(scales)
    _check(scales)
    if of_stages is not None:
        of_model = torch.zeros(len(pool.shape.windows), 2, device=pool.device)
        of_model[pool.shape.first_layer :][: len(scales)] = pool.scales
        pool.model_scales = of_stages(of_model)  # a scale is above 0
    source = config.kv_scales_path or "the checkpoint"
    if bool((scales == 1).all()):
        source = f"1, {source} has no others"
    return [f"KV scales: {kind}, {source}"]


def _check(scales: Tensor) -> None:
    bad = ~(scales.isfinite() & (scales > 0)).all(1)
    if bad.any():
        layer = int(bad.nonzero()[0])
        raise LoadError(f"KV scales must be above 0, layer {layer} has {scales[layer].tolist()}")
