"""Settings of a worker that follow from several flags: CUDA graphs (--compilation-config) and the KV cache.

Kernels are written by hand here, so a compilation level only chooses CUDA graphs and fused kernels.
"""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from blockyard.shared.architectures import find_architecture
from blockyard.shared.config.flags import FLAGS
from blockyard.shared.config.parsed_flags import Values
from blockyard.shared.config.services.process import BusConfig
from blockyard.shared.config.services.worker import USUAL_SEQS, LogprobsMode, capture_sizes
from blockyard.shared.config.text_part import text_part
from blockyard.shared.errors import ConfigError
from blockyard.shared.quantization.method import has_fp8_kv

FP8 = "fp8"
FLAG = "compilation-config"
QUERY_HEADS = ("num_attention_heads", "n_head")  # in config.json
NUM_LAYERS = ("num_hidden_layers", "n_layer")
PARALLEL = ("tensor-parallel-size", "pipeline-parallel-size")
EPLB, EPLB_CONFIG = "enable-eplb", "eplb-config"
EXECUTOR = "distributed-executor-backend"
LEVELS = range(4)
MOST_SEQS = 1024  # of a worker on a GPU without --max-num-seqs
NUM_SEQS = ("max-num-seqs", "max-num-active-seqs")
STEP_TOKENS = ("max-num-batched-tokens", "max-num-scheduled-tokens")
DENSE_SIZES = 32  # up to this batch size, --performance-mode interactivity captures each


class Compilation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The keys of vLLM's --compilation-config that have an effect here."""

    level: int = 2
    use_cudagraph: bool = True
    cudagraph_capture_sizes: list[int] = []


class BalanceKeys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The keys of vLLM's --eplb-config."""

    window_size: int = 1000
    step_interval: int = 3000
    log_balancedness: bool = False
    num_redundant_experts: int = 0
    log_balancedness_interval: int | None = None
    use_async: bool | None = None
    policy: str | None = None
    communicator: str | None = None


WITHOUT_EFFECT = {  # keys of --eplb-config
    "log_balancedness_interval": "a line is written after each step_interval",
    "use_async": "experts of one layer move between two steps",
    "policy": "there is one",
    "communicator": "ranks send experts as they send all else",
}


def graph_fields(values: Values) -> dict[str, Any]:
    """Returns WorkerConfig's fields for CUDA graphs, their sizes, and fused kernels. Raises ConfigError."""
    given = values.maybe(FLAG, str)
    asked = _read(values, given) if given is not None else Compilation()
    level = _level(values, asked, given)
    eager = values.get("enforce-eager", bool) or level == 0
    return {
        "enforce_eager": eager or not asked.use_cudagraph,
        "fused_steps": level >= 2,
        "graph_sizes": _graph_sizes(values, asked.cudagraph_capture_sizes),
    }


def logprobs_fields(values: Values) -> dict[str, Any]:
    """Returns WorkerConfig's fields for other log-probabilities than the raw ones, which no kernel computes."""
    if values["logprobs-mode"] == LogprobsMode.RAW_LOGPROBS:
        return {}
    return {"run_ahead_penalties": False}


def _level(values: Values, asked: Compilation, given: str | None) -> int:
    """Returns the level of --optimization-level or --compilation-config. Raises ConfigError."""
    wanted = values.maybe("optimization-level", str)
    if wanted is None:
        return asked.level
    level = int(wanted.lstrip("O"))
    if given is not None and asked.level not in (level, Compilation().level):
        raise ConfigError(f"{values.where('optimization-level')} {wanted} and --{FLAG} {given} disagree")
    return level


def _graph_sizes(values: Values, of_compilation: list[int]) -> list[int]:
    """Returns the batch sizes for CUDA graphs; empty: the worker's usual ones. Raises ConfigError."""
    where, given = values.where("cudagraph-capture-sizes"), values.get("cudagraph-capture-sizes", list)
    sizes, most = sorted({*given} or {*of_compilation}), values.maybe("max-cudagraph-capture-size", int)
    if given and of_compilation and sizes != sorted({*of_compilation}):
        raise ConfigError(f"{where} and --{FLAG} disagree")
    num_seqs_most = num_seqs(values)
    if values["performance-mode"] == "interactivity" and not sizes:
        sizes = sorted({*range(1, min(DENSE_SIZES, num_seqs_most) + 1), *capture_sizes(num_seqs_most)})
    if most is None:
        return sizes
    if sizes and sizes[0] > most:
        raise ConfigError(f"{values.where('max-cudagraph-capture-size')} {most}: the least of the sizes is {sizes[0]}")
    return [n for n in sizes if n <= most] or capture_sizes(min(most, num_seqs_most))


def seq_fields(values: Values) -> dict[str, Any]:
    """Returns WorkerConfig's limit of sequences, and whether the worker lowers it to what its KV memory is good for."""
    return {"max_num_seqs": num_seqs(values), "fit_max_num_seqs": not any(map(values.is_given, NUM_SEQS))}


def num_seqs(values: Values) -> int:
    """Returns the most sequences that may run at a time: --max-num-seqs, or the highest that a worker sets itself."""
    asked, active = (values.maybe(name, int) for name in NUM_SEQS)
    if asked is None:
        most = MOST_SEQS if kv_on_gpu(values) else USUAL_SEQS
        most *= 2 if values["performance-mode"] == "throughput" else 1
        asked = max(min(most, asked_step_tokens(values) or most), USUAL_SEQS)
    return asked if active is None else min(asked, active)


def asked_step_tokens(values: Values) -> int | None:
    """Returns the most tokens of a step that flags give: the lower of two."""
    return min((asked for name in STEP_TOKENS if (asked := values.maybe(name, int)) is not None), default=None)


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
    """Returns lines about flags, and keys of them, that have no effect. Raises ConfigError."""
    keys, where = _balance_keys(values), values.where(EPLB_CONFIG)
    found = [
        f"{where}: {name} {value}: has no effect, {reason}"
        for name, reason in WITHOUT_EFFECT.items()
        if (value := getattr(keys, name)) is not None
    ]
    if values.maybe("kv-cache-memory-bytes", int) is not None and values.is_given("gpu-memory-utilization"):
        found.append(f"{values.where('gpu-memory-utilization')}: has no effect beside --kv-cache-memory-bytes")
    return found


def on_gpu(values: Values) -> bool:
    """Returns whether the device of workers is a GPU, as far as known without torch."""
    device = values.get("device", str)
    return device == "cuda" or (device == "auto" and os.path.exists("/dev/nvidiactl"))


def kv_on_gpu(values: Values) -> bool:
    """Returns whether workers have their KV blocks on GPUs. Mock workers need no device."""
    return on_gpu(values) and values["worker-cls"] != "mock"


def check_ranks(values: Values, config: Mapping[str, Any]) -> None:
    """Raises ConfigError for ranks of a worker that cannot be. config: of config.json."""
    size = values.get("tensor-parallel-size", int)
    backend, asked = values.where(EXECUTOR), executor(values)
    if asked == "external_launcher":
        raise ConfigError(f"{backend} external_launcher is for blockyard.LLM in a script under torchrun; use mp")
    for flag in PARALLEL if asked == "uni" else ():
        if (number := values.get(flag, int)) > 1:
            raise ConfigError(f"{backend} uni is for one rank; {values.where(flag)} {number} needs mp")
    if values["worker-cls"] == "mock":
        return
    names = config.get("architectures")
    is_known = not isinstance(names, list) or find_architecture(names) is not None
    by_class = values["model-impl"] == "transformers" or not is_known
    if by_class and (number := values.get("pipeline-parallel-size", int)) > 1:
        where = f"{values.where('pipeline-parallel-size')} {number}"
        raise ConfigError(f"{where}: not built for models that run by their class in transformers")
    if size == 1:
        return
    where = f"{values.where('tensor-parallel-size')} {size}"
    heads = next((config[name] for name in QUERY_HEADS if isinstance(config.get(name), int)), size)
    if size > heads:
        raise ConfigError(f"{where} is more than the {heads} query heads of a layer")


def expert_fields(values: Values) -> dict[str, Any]:
    """Returns WorkerConfig's field for moves of experts. Raises ConfigError."""
    where, keys = values.where(EPLB), _balance_keys(values)
    if not values[EPLB]:
        if values.maybe(EPLB_CONFIG, dict):
            raise ConfigError(f"{values.where(EPLB_CONFIG)}: needs --{EPLB}")
        return {}
    if not values["enable-expert-parallel"]:
        raise ConfigError(f"{where}: needs --enable-expert-parallel: otherwise each rank has a share of every expert")
    if values["batch-invariant"]:
        raise ConfigError(f"{where}: not with --batch-invariant: a sum's rounding depends on which rank has an expert")
    return {
        "expert_balance": {
            "interval_steps": keys.step_interval,
            "window_steps": min(keys.window_size, keys.step_interval),
            "logs": keys.log_balancedness,
        }
    }


def _balance_keys(values: Values) -> BalanceKeys:
    """Reads --eplb-config. Raises ConfigError for a key that is unknown, refused or wrong."""
    where = values.where(EPLB_CONFIG)
    try:
        keys = msgspec.convert(values.maybe(EPLB_CONFIG, dict) or {}, BalanceKeys)
    except msgspec.ValidationError as e:
        raise ConfigError(f"{where}: {e}; the keys are {', '.join(BalanceKeys.__struct_fields__)}") from e
    if keys.num_redundant_experts:
        raise ConfigError(f"{where}: num_redundant_experts {keys.num_redundant_experts}: not built yet; use 0")
    for name in ("window_size", "step_interval"):
        if (value := getattr(keys, name)) < 1:
            raise ConfigError(f"{where}: {name} {value}: must be at least 1")
    return keys


def executor(values: Values) -> str | None:
    """Returns who is to start ranks, or None if no flag says so. Raises ConfigError for two that disagree."""
    given = values.maybe(EXECUTOR, str)
    if not values["worker-use-ray"]:
        return given
    if given not in (None, "ray"):
        raise ConfigError(f"{values.where('worker-use-ray')} and {values.where(EXECUTOR)} {given} disagree")
    return "ray"


def node_fields(values: Values, bus: BusConfig) -> dict[str, Any]:
    """Returns WorkerConfig's fields for ranks on several hosts. Raises ConfigError for hosts that cannot be."""
    num, number = values.get("nnodes", int), values.get("node-rank", int)
    where, num_ranks = f"{values.where('nnodes')} {num}", math.prod(values.get(flag, int) for flag in PARALLEL)
    if number >= num:
        raise ConfigError(f"{values.where('node-rank')} {number}: the hosts of {where} have numbers below {num}")
    if num == 1:
        return {}
    if values["worker-cls"] == "mock":
        raise ConfigError(f"{where}: a mock worker has one rank")
    if num_ranks % num:
        raise ConfigError(f"{where}: each host has as many ranks, and there are {num_ranks}")
    if bus.bind.startswith("tcp://0.0.0.0"):
        raise ConfigError(f"{where}: --bind tcp://ADDRESS is needed, the network interface for links between ranks")
    return {"num_nodes": num, "node_rank": number, "rank_group": values.maybe("name", str) or "gpu_worker"}


def check_one_host(values: Values) -> None:
    """Raises ConfigError for flags of several hosts where all of a ring's processes are on one."""
    for name in ("nnodes", "node-rank"):
        if values.is_given(name) and values.get(name, int) != FLAGS[name].default:
            raise ConfigError(f"{values.where(name)}: is for `blockyard run gpu-worker`, on each host")
    if values.is_given("data-parallel-rank"):
        raise ConfigError(f"{values.where('data-parallel-rank')}: is for `blockyard run gpu-worker`, of each replica")


def stage_fields(values: Values, config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns WorkerConfig's field for the layers of pipeline stages. Raises ConfigError for stages that cannot be.

    config: of config.json.
    """
    size, given = values.get("pipeline-parallel-size", int), values.maybe("pipeline-layers", list)
    where, text = f"{values.where('pipeline-parallel-size')} {size}", text_part(config)
    num = next((text[name] for name in NUM_LAYERS if isinstance(text.get(name), int)), None)
    if values["worker-cls"] != "mock" and num is not None and size > max(num, 1):
        raise ConfigError(f"{where} is more than the {num} layers of the model")
    if given is None:
        return {}
    layers, asked = list(map(int, given)), f"{values.where('pipeline-layers')} {','.join(map(str, given))}"
    if len(layers) != size or min(layers) < 1:
        raise ConfigError(f"{asked}: a number of layers is needed for each of {size} pipeline stages, at least 1")
    if num is not None and sum(layers) != num:
        raise ConfigError(f"{asked}: these are {sum(layers)} layers, and the model has {num}")
    return {"pipeline_layers": layers}


def kv_dtype(values: Values, quantization: Mapping[str, Any]) -> str:
    """Returns --kv-cache-dtype, or instead of `auto` what quantization_config of the checkpoint says of GPUs.

    It is the same on all machines of a ring, also on those without a GPU. Raises ConfigError.
    """
    given = values.get("kv-cache-dtype", str)
    if given != "auto" or values.get("device", str) == "cpu" or values.get("dtype", str) in ("float", "float32"):
        return given
    return FP8 if values["worker-cls"] != "mock" and has_fp8_kv(quantization) else given


def kv_fields(values: Values, quantization: Mapping[str, Any]) -> dict[str, Any]:
    """Returns WorkerConfig's field for the dtype of the KV cache. Raises ConfigError."""
    given = values.get("kv-cache-dtype", str)
    return {"kv_cache_dtype": kv_dtype(values, quantization) if kv_on_gpu(values) else given}


def kv_notes(values: Values, quantization: Mapping[str, Any]) -> list[str]:
    """Returns a line if the checkpoint decides the dtype of the KV cache. Raises ConfigError."""
    found = kv_dtype(values, quantization)
    if found == values.get("kv-cache-dtype", str):
        return []
    return [f"KV cache: {found} on GPUs, as quantization_config of the checkpoint says (--kv-cache-dtype auto)"]


def kv_scope(values: Values, quantization: Mapping[str, Any]) -> str:
    """Returns the settings that KV values depend on, for the block hashes. quantization: see `kv_dtype`."""
    words = [kv_dtype(values, quantization), values.maybe("quantization-param-path", str) or ""]
    if values.get("calculate-kv-scales", bool):
        words.append("calculated")
    return " ".join(word for word in words if word)
