"""Settings of a worker that follow from several flags: CUDA graphs (--compilation-config) and the KV cache.

Kernels are written by hand here, so a compilation level only chooses CUDA graphs and fused kernels.
"""

import os
from pathlib import Path
from typing import Any

import msgspec

from blockyard.shared.config.parsed_flags import Values
from blockyard.shared.config.services.worker import USUAL_SEQS
from blockyard.shared.errors import ConfigError

FLAG = "compilation-config"
LEVELS = range(4)
MOST_SEQS = 1024  # of a worker on a GPU without --max-num-seqs


class Compilation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The keys of vLLM's --compilation-config that have an effect here."""

    level: int = 2
    use_cudagraph: bool = True
    cudagraph_capture_sizes: list[int] = []


def graph_fields(values: Values) -> dict[str, Any]:
    """Returns WorkerConfig's fields for CUDA graphs, their sizes, and fused kernels. Raises ConfigError."""
    given = values.maybe(FLAG, str)
    asked = _read(values, given) if given is not None else Compilation()
    eager = values.get("enforce-eager", bool) or asked.level == 0
    return {
        "enforce_eager": eager or not asked.use_cudagraph,
        "fused_steps": asked.level >= 2,
        "graph_sizes": sorted(set(asked.cudagraph_capture_sizes)),
    }


def seq_fields(values: Values) -> dict[str, Any]:
    """Returns WorkerConfig's limit of sequences, and whether the worker lowers it to what its KV memory is good for."""
    return {"max_num_seqs": num_seqs(values), "fit_max_num_seqs": not values.is_given("max-num-seqs")}


def num_seqs(values: Values) -> int:
    """Returns the most sequences that may run at a time: --max-num-seqs, or the highest that a worker sets itself."""
    asked = values.maybe("max-num-seqs", int)
    if asked is not None:
        return asked
    budget = values.maybe("max-num-batched-tokens", int) or MOST_SEQS
    return max(min(MOST_SEQS, budget), USUAL_SEQS) if kv_on_gpu(values) else USUAL_SEQS


def _read(values: Values, given: str) -> Compilation:
    text = given if given.lstrip().startswith("{") else f'{{"level": {given}}}'
    try:
        asked = msgspec.json.decode(text, type=Compilation)
    except msgspec.DecodeError as e:
        known = ", ".join(Compilation.__struct_fields__)
        raise ConfigError(
            f"{values.where(FLAG)} {given}: a level from 0 to 3, or a JSON object of {known} ({e})"
        ) from e
    if asked.level not in LEVELS:
        raise ConfigError(f"{values.where(FLAG)} {given}: levels are 0 to 3")
    if any(size < 1 for size in asked.cudagraph_capture_sizes):
        raise ConfigError(f"{values.where(FLAG)} {given}: sizes of graphs are 1 or more")
    return asked


def check_kv_cache(values: Values) -> None:
    """Raises ConfigError if flags of the KV cache contradict each other."""
    dtype, path = values.get("kv-cache-dtype", str), values.maybe("quantization-param-path", str)
    calculated = values.get("calculate-kv-scales", bool)
    for name, given in (("quantization-param-path", path), ("calculate-kv-scales", calculated)):
        if given and dtype == "auto":
            raise ConfigError(f"{values.where(name)}: scales need an 8-bit KV cache: set --kv-cache-dtype fp8")
    if path and calculated:
        raise ConfigError(f"{values.where('calculate-kv-scales')}: --quantization-param-path gives them already")
    if path and not Path(path).is_file():
        raise ConfigError(f"{values.where('quantization-param-path')}: {path} is not a file")
    if values.is_given("cpu-kv-gib") and values.is_given("kv-cache-memory-bytes"):
        raise ConfigError(f"{values.where('cpu-kv-gib')}: --kv-cache-memory-bytes says how much already")
    if dtype != "auto" and values.get("device", str) == "cpu":
        raise ConfigError(f"{values.where('kv-cache-dtype')} {dtype}: 8 bits need a GPU; on CPU leave it at auto")


def notes(values: Values) -> list[str]:
    """Returns a line if --kv-cache-memory-bytes makes --gpu-memory-utilization ineffective."""
    if values.maybe("kv-cache-memory-bytes", int) is None or not values.is_given("gpu-memory-utilization"):
        return []
    return [f"{values.where('gpu-memory-utilization')}: has no effect beside --kv-cache-memory-bytes"]


def on_gpu(values: Values) -> bool:
    """Returns whether the device of workers is a GPU, as far as known without torch."""
    device = values.get("device", str)
    return device == "cuda" or (device == "auto" and os.path.exists("/dev/nvidiactl"))


def kv_on_gpu(values: Values) -> bool:
    """Returns whether workers have their KV blocks on GPUs. Mock workers need no device."""
    return on_gpu(values) and values["worker-cls"] != "mock"


def kv_scope(values: Values) -> str:
    """Returns the settings that KV values depend on, for the block hashes."""
    words = [values.get("kv-cache-dtype", str), values.maybe("quantization-param-path", str) or ""]
    if values.get("calculate-kv-scales", bool):
        words.append("calculated")
    return " ".join(word for word in words if word)
