"""Turns flags into each service's settings. "auto", and values that depend on several flags, are settled here."""

from collections.abc import Callable
from itertools import accumulate
from typing import Any, TypeVar

import msgspec

from blockyard.shared.config import (
    adapters,
    host_memory,
    kv_transfer,
    output_parsers,
    structured_outputs,
    worker_fields,
    worker_roles,
)
from blockyard.shared.config.checkpoint import (
    Checkpoint,
    asked_quantization,
    chat_template,
    check_length,
    config_overrides,
    context_limit,
    file_format,
    model_length,
    quantized_overrides,
    said_quantization,
    sampling_defaults,
    tokens_of_an_expert,
)
from blockyard.shared.config.flags import FLAGS
from blockyard.shared.config.parsed_flags import Values
from blockyard.shared.config.pooling.pooling_card import hidden_size
from blockyard.shared.config.pooling.pooling_fields import (
    is_encoder,
    message_settings,
    pair_template,
    pooling_notes,
    task_of,
    worker_pooling_fields,
)
from blockyard.shared.config.pooling.task_choice import GENERATE
from blockyard.shared.config.server import access_keys, http_server, log_settings, server_info
from blockyard.shared.config.services.detokenizer import DetokenizerConfig
from blockyard.shared.config.services.gateway import GatewayConfig
from blockyard.shared.config.services.process import BusConfig, LogLevel, ProcessConfig
from blockyard.shared.config.services.registry import RegistryConfig
from blockyard.shared.config.services.scheduler import SchedulerConfig
from blockyard.shared.config.services.tokenizer import TokenizerConfig
from blockyard.shared.config.services.worker import USUAL_SEQS, WorkerConfig
from blockyard.shared.config.worker_roles import WorkersOfRole, num_expert_replicas
from blockyard.shared.errors import ConfigError
from blockyard.shared.messages import ModelSettings

ServiceStruct = RegistryConfig | GatewayConfig | TokenizerConfig | DetokenizerConfig | SchedulerConfig | WorkerConfig
S = TypeVar("S", bound=msgspec.Struct)

GPU_STEP_TOKENS = 2048
# A step with prompts reads all experts. Where each gets fewer tokens than this, reading them takes longer than their
# products, and a step of twice as many tokens takes much less than twice as long.
FEW_TOKENS_OF_AN_EXPERT = 256
MOCK_LENGTH = 32768  # context length of a mock worker, if the model has none
DEPTH_FLAGS = ("run-ahead", "disable-async-output-proc", "num-scheduler-steps", "num-lookahead-slots")
# No decode waits for a step of a pooling model, and larger ones leave a GPU idle less often. The host launches kernels
# of a narrow decoder for longer than they run: those of a step of 8,192 tokens of a 0.6B run 15 ms of 25.
POOLING_GPU_STEP_TOKENS = 8192
NARROW = 2048  # hidden size, below which a step has twice as many
CPU_STEP_TOKENS = 512  # a longer prefill chunk would delay decodes in the same step
ENCODER_CPU_STEP_TOKENS = 2048  # enough texts for the threads of a few cores


class Deployment(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of every process of one machine's ring."""

    registry: RegistryConfig
    gateways: list[GatewayConfig]
    tokenizers: list[TokenizerConfig]
    detokenizers: list[DetokenizerConfig]
    scheduler: SchedulerConfig
    workers: list[WorkerConfig]
    notes: list[str]  # lines printed at the start
    hung_timeout_s: float = 10.0  # silence after which a ready child is killed; 0: never


def resolve(values: Values, model: Checkpoint, bus: BusConfig) -> Deployment:
    """Returns the settings of all processes of a ring. Raises ConfigError."""

    def process(name: str) -> ProcessConfig:
        return process_config(values, name, bus)

    worker_fields.check_one_host(values)
    to_start = worker_roles.workers_to_start(values)
    return Deployment(
        registry=registry(process("message_bus")),
        gateways=[gateway(values, process(name), i) for i, name in _numbered("api_gateway", values, "api-gateways")],
        tokenizers=[tokenizer(values, model, process(f"tokenizer_pool {i}")) for i in range(num_tokenizers(values))],
        detokenizers=[
            detokenizer(values, model, process(name)) for _, name in _numbered("detokenizer", values, "detokenizers")
        ],
        scheduler=scheduler(values, model, process("scheduler"), [each.values for each in to_start]),
        workers=workers(to_start, model, process),
        notes=[
            *values.notes(),
            *http_server.notes(values),
            *adapters.notes(values),
            *model_notes(values, model),
            *worker_notes(values, is_local=True),
        ],
        hung_timeout_s=values.get("hung-timeout", float),
    )


def model_notes(values: Values, model: Checkpoint) -> list[str]:
    """Returns a line for each choice of `auto` that follows from the model, and for files that differ. Raises
    ConfigError."""
    of_kv = worker_fields.kv_notes(values, said_quantization(values, model))
    of_parsers = output_parsers.output_parsers(values, model).notes
    return [*of_parsers, *model.quantization_notes, *of_kv, *pooling_notes(values, model)]


def worker_notes(values: Values, is_local: bool) -> list[str]:
    """Returns a line for each flag of KV memory and KV transfers that has no effect, or another one than it says.

    is_local: all workers of the ring run on this machine.
    """
    of_memory = [
        note
        for each in worker_roles.of_any_role(values)
        for note in (*host_memory.notes(each), *worker_fields.notes(each))
    ]
    return [*dict.fromkeys(of_memory), *kv_transfer.notes(values, is_local)]


def process_config(values: Values, name: str, bus: BusConfig) -> ProcessConfig:
    level = log_settings.log_level(values)
    if name.startswith("api_gateway"):
        level = values.maybe("uvicorn-log-level", str) or level
    return ProcessConfig(
        name=name,
        bus=bus,
        log_level=msgspec.convert(level, LogLevel),
        log_config_file=log_settings.config_file(values),
    )


def registry(process: ProcessConfig) -> RegistryConfig:
    return RegistryConfig(process=process)


def gateway(values: Values, process: ProcessConfig, index: int = 0) -> GatewayConfig:
    fields = _fields(values, "gateway")
    fields |= http_server.tls_fields(values, fields.pop("tls", {}))
    fields |= http_server.log_fields(values)
    http_server.check_socket(values)
    http_server.check_gateways(values)
    adapters.check_folder(values)
    base = values.get("metrics-port", int)
    if base and base + index > 65535:
        raise ConfigError(f"{values.where('metrics-port')}: {base} plus {index} gateways is beyond 65535")
    return _struct(
        GatewayConfig,
        process,
        fields
        | {
            "metrics_port": base + index if base else 0,
            "api_keys": access_keys.flag_keys(values, "api-key"),
            "admin_keys": access_keys.flag_keys(values, "admin-key"),
            "api_key_file": access_keys.key_file(values, "api-key-file"),
            "admin_key_file": access_keys.key_file(values, "admin-key-file"),
            "served_model_names": served_names(values),
            "parser_plugins": msgspec.to_builtins(output_parsers.plugins(values)),
            **server_info.fields(values),
        },
    )


def tokenizer(values: Values, model: Checkpoint, process: ProcessConfig) -> TokenizerConfig:
    return _struct(
        TokenizerConfig,
        process,
        _fields(values, "tokenizer")
        | {
            "tokenizer_path": str(model.tokenizer_path),
            "served_model_names": served_names(values),
            "chat_template": chat_template(values),
            "pair_template": pair_template(values, model),
            "messages": message_settings(values, model),
            "block_scope": block_scope(values, model),
            "grammar_engine": structured_outputs.grammar_defaults(values).engine,
        },
    )


def detokenizer(values: Values, model: Checkpoint, process: ProcessConfig) -> DetokenizerConfig:
    return DetokenizerConfig(
        process=process, tokenizer_path=str(model.tokenizer_path), served_model_names=served_names(values)
    )


def scheduler(
    values: Values, model: Checkpoint, process: ProcessConfig, of_workers: list[Values] | None = None
) -> SchedulerConfig:
    """of_workers: the flags of each kind of worker; by default those of every role. A worker may have lower limits."""
    fields = _fields(values, "scheduler")
    of_workers = worker_roles.of_any_role(values) if of_workers is None else of_workers
    budgets = [step_tokens(each, model) for each in of_workers]
    delay_s, stall_s = values.maybe("max-queue-delay", float), values.get("stall-timeout", float)
    if delay_s is not None and delay_s >= stall_s:
        raise ConfigError(
            f"{values.where('max-queue-delay')} {delay_s:g}: less than --stall-timeout, {stall_s:g}, is needed, "
            "after which a gateway sends again what waits"
        )
    if not values.get("enable-chunked-prefill", bool):
        length = context_limit(values, model.config) or model_length(model.config) or 0
        budget, each = min(zip(budgets, of_workers, strict=True), key=lambda one: one[0])
        if budget < length:  # workers of any role compute prompts while there are no others
            raise ConfigError(
                f"{each.where('max-num-batched-tokens')} {budget}: without chunked prefill a step must hold the "
                f"longest prompt, {length} tokens"
            )
    return _struct(
        SchedulerConfig,
        process,
        fields
        | {
            "served_model_names": served_names(values),
            "root": model.name,
            "model": msgspec.to_builtins(model_settings(values, model)),
            "max_num_seqs": max(worker_fields.num_seqs(each) for each in of_workers),
            "max_num_batched_tokens": max(budgets),
            "depth": run_ahead(values),
            "block_scope": block_scope(values, model),
            "adapters": msgspec.to_builtins(adapters.scheduler_settings(values, model.adapters)),
            **kv_transfer.scheduler_fields(values),
        },
    )


def model_settings(values: Values, model: Checkpoint) -> ModelSettings:
    """Returns how requests to the model are read, for its card. Raises ConfigError."""
    structured_outputs.check_processor_pattern(values)
    template_kwargs = values.get("default-chat-template-kwargs", dict)
    settled: dict[str, Any] = {
        "defaults": sampling_defaults(values, model.generation),
        "grammars": structured_outputs.grammar_defaults(values),
        "tools": output_parsers.output_parsers(values, model).defaults,
        "template_kwargs": msgspec.json.encode(template_kwargs) if template_kwargs else b"",
    }
    return ModelSettings(**_fields(values, "scheduler")["model"] | settled)


def worker(of_role: WorkersOfRole, model: Checkpoint, process: ProcessConfig) -> WorkerConfig:
    """Returns the settings of one worker of a role. Raises ConfigError."""
    values = of_role.values
    worker_fields.check_kv_cache(values)
    worker_fields.check_ranks(values, model.config)
    fields, pooling = _fields(values, "worker"), worker_pooling_fields(values, model)
    lora = adapters.worker_config(values, model.adapters)
    if values["worker-cls"] == "mock":
        overrides = config_overrides(values)
    else:
        check_length(values, model)
        overrides = quantized_overrides(values, model)
    fields["mock"]["vocab_size"] = fields["mock"]["vocab_size"] or model.config.get("vocab_size", 0)
    fields["mock"]["max_model_len"] = model_length(model.config) or MOCK_LENGTH
    return _struct(
        WorkerConfig,
        process,
        fields
        | {
            "model_path": str(model.path),
            "config_path": str(model.config_path or ""),
            "modules_path": str(model.modules_path or ""),
            "tokenizer_path": str(model.tokenizer_path),
            "load_format": file_format(values),
            "served_model_names": served_names(values),
            "max_num_batched_tokens": step_tokens(values, model),
            "max_model_len": context_limit(values, model.config),
            "fit_max_model_len": values["max-model-len"] == "auto",
            "swap_space_gib": host_memory.swap_space(values),
            "kv_transfer": msgspec.to_builtins(kv_transfer.worker_config(values, of_role.role, process.bus)),
            "lora": msgspec.to_builtins(lora),
            "prompts": msgspec.to_builtins(adapters.prompt_config(values)),
            **worker_fields.seq_fields(values),
            **worker_fields.graph_fields(values),
            **worker_fields.logprobs_fields(values),
            **worker_fields.kv_fields(values, said_quantization(values, model)),
            "config_overrides": msgspec.json.encode(overrides).decode(),
            **pooling,
            **worker_fields.expert_fields(values),
            **worker_fields.node_fields(values, process.bus),
            **worker_fields.stage_fields(values, model.config),
        },
    )


def workers(
    to_start: list[WorkersOfRole], model: Checkpoint, process: Callable[[str], ProcessConfig]
) -> list[WorkerConfig]:
    """Returns the settings of each worker of this machine. Raises ConfigError."""
    host_memory.check((each.values, each.num_workers) for each in to_start)
    num = sum(each.num_workers for each in to_start)
    has_gpu = worker_fields.kv_on_gpu(to_start[0].values)
    if num == 1:
        config = worker(to_start[0], model, process(to_start[0].name))
        return [msgspec.structs.replace(config, gpu=0 if has_gpu and config.num_ranks > 1 else None)]
    made: list[WorkerConfig] = []
    for each in to_start:
        together, first = num_expert_replicas(each, model), len(made)
        for i in range(each.num_workers):
            place = {"expert_replicas": together, "replica": i % together, "replica_group": first + i - i % together}
            config = worker(each, model, process(f"{each.name} {i}"))
            made.append(msgspec.structs.replace(config, replicas=num, **place))
    gpus = accumulate((config.num_ranks for config in made), initial=0)
    return [
        msgspec.structs.replace(config, gpu=gpu if has_gpu else None) for config, gpu in zip(made, gpus, strict=False)
    ]


def block_scope(values: Values, model: Checkpoint) -> str:
    """Returns what KV depends on besides tokens. Tokenizers and scheduler need the same value for equal hashes."""
    overrides = msgspec.json.encode(config_overrides(values)).decode()
    words = [model.name, model.revision, worker_fields.kv_scope(values, said_quantization(values, model)), overrides]
    more = (asked_quantization(values), values.maybe("hf-config-path", str))
    return "|".join([*words, *(word for word in more if word is not None)])


def served_names(values: Values) -> list[str]:
    return values.get("served-model-name", list) or [values.get("model", str)]


def num_tokenizers(values: Values) -> int:
    """Returns --tokenizers, or vLLM's --tokenizer-pool-size or --renderer-num-workers. Raises ConfigError."""
    names = [name for name in ("tokenizers", "tokenizer-pool-size", "renderer-num-workers") if values.is_given(name)]
    given = {name: max(1, number) for name in names if (number := values.maybe(name, int)) is not None}
    if len(set(given.values())) > 1:
        raise ConfigError(f"{' and '.join(f'--{name} {values[name]}' for name in given)} disagree")
    return next(iter(given.values()), values.get("tokenizers", int))


def run_ahead(values: Values) -> int | None:
    """Returns how many plans are sent ahead; None: the scheduler decides by step times. Raises ConfigError."""
    depth = values.maybe("run-ahead", int)
    if depth is None and values.get("disable-async-output-proc", bool):
        depth = 0
    if depth is None:
        depth = max(values.get("num-scheduler-steps", int) - 1, values.get("num-lookahead-slots", int)) or None
    if not values.is_given("async-scheduling"):
        return depth
    wanted = values.get("async-scheduling", bool)
    if depth is not None and bool(depth) != wanted:
        said = next(name for name in DEPTH_FLAGS if values.is_given(name))
        raise ConfigError(f"{values.where('async-scheduling')} and {values.where(said)}: give one of them")
    return depth if wanted else 0


def step_tokens(values: Values, model: Checkpoint) -> int:
    """Returns the most tokens of a step. Raises ConfigError if there are fewer than running sequences."""
    asked = worker_fields.asked_step_tokens(values)
    least = values.maybe("max-num-seqs", int) or USUAL_SEQS
    if asked is not None:
        if asked < least:
            said = next(name for name in worker_fields.STEP_TOKENS if values[name] == asked)
            raise ConfigError(
                f"{values.where(said)} {asked}: at least {values.where('max-num-seqs')}, {least}, is needed"
            )
        return asked
    usual = ENCODER_CPU_STEP_TOKENS if is_encoder(values, model) else CPU_STEP_TOKENS
    if worker_fields.on_gpu(values):
        of_an_expert = tokens_of_an_expert(model.config, GPU_STEP_TOKENS)
        has_few = of_an_expert is not None and of_an_expert < FEW_TOKENS_OF_AN_EXPERT
        usual = 2 * GPU_STEP_TOKENS if has_few else GPU_STEP_TOKENS
        if task_of(values, model) != GENERATE:
            is_narrow = not is_encoder(values, model) and 0 < hidden_size(model.config) < NARROW
            usual = 2 * POOLING_GPU_STEP_TOKENS if is_narrow else POOLING_GPU_STEP_TOKENS
    if not values.get("enable-chunked-prefill", bool):
        usual = max(usual, context_limit(values, model.config) or model_length(model.config) or 0)
    if values["performance-mode"] == "throughput":
        usual *= 2
    # a full batch must leave tokens for prompts, or new requests would wait until others end
    return max(usual, 2 * worker_fields.num_seqs(values))


def _numbered(role: str, values: Values, flag: str) -> list[tuple[int, str]]:
    return [(i, f"{role} {i}") for i in range(values.get(flag, int))]


def _fields(values: Values, service: str) -> dict[str, Any]:
    """Returns the values that flags map to this service's struct by `to`, nested like it, without unset ones."""
    fields: dict[str, Any] = {}
    for flag in FLAGS.values():
        for target in flag.to:
            path = target.lstrip("!").split(".")
            if path[0] != service or (value := values[flag.name]) is None:
                continue
            inner = fields
            for name in path[1:-1]:
                inner = inner.setdefault(name, {})
            inner[path[-1]] = not value if target.startswith("!") else value
    return fields


def _struct(kind: type[S], process: ProcessConfig, fields: dict[str, Any]) -> S:
    try:
        return msgspec.convert(fields | {"process": msgspec.to_builtins(process)}, kind)
    except msgspec.ValidationError as e:
        raise ConfigError(str(e)) from e
