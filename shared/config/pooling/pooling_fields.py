"""Settings of services that follow from a pooling task, and lines about flags that have no effect with it."""

from typing import Any

import msgspec

from blockyard.shared.chat_template_files import chat_templates
from blockyard.shared.config import adapters
from blockyard.shared.config.checkpoint import Checkpoint, chat_template, config_overrides, context_limit
from blockyard.shared.config.parsed_flags import Values
from blockyard.shared.config.pooling.activations import num_outputs, settle_activation
from blockyard.shared.config.pooling.output_kinds import OutputKind, default_pooling, first_kind, sees_both_sides
from blockyard.shared.config.pooling.pair_templates import choose_pair_template
from blockyard.shared.config.pooling.pooler_config import read_overrides
from blockyard.shared.config.pooling.pooling_card import hidden_size
from blockyard.shared.config.pooling.pooling_choice import choose_pooling
from blockyard.shared.config.pooling.sentence_modules import read_modules
from blockyard.shared.config.pooling.sentence_settings import read_settings
from blockyard.shared.config.pooling.task_choice import GENERATE, settle_task
from blockyard.shared.config.services.tokenizer import MessageSettings
from blockyard.shared.context_length import longest_sequence
from blockyard.shared.errors import ConfigError
from blockyard.shared.json_objects import merge_patch
from blockyard.shared.messages import PoolingTask

_OF_DECODING = (
    *("generation-config", "override-generation-config", "max-logprobs", "logprobs-mode", "run-ahead-penalties"),
    *("logits-processors", "logits-processor-pattern", "guided-decoding-backend", "structured-outputs-config"),
    *("enable-auto-tool-choice", "tool-call-parser", "tool-parser-plugin", "exclude-tools-when-tool-choice-none"),
    *("reasoning-parser", "reasoning-config", "reasoning-parser-plugin", "stream-interval", "detokenizers"),
    *("cudagraph-capture-sizes", "max-cudagraph-capture-size"),
)
_OF_KV = (
    *("block-size", "enable-prefix-caching", "kv-cache-dtype", "swap-space", "num-gpu-blocks-override", "cpu-kv-gib"),
    *("kv-cache-memory-bytes", "watermark", "preemption-mode", "enable-chunked-prefill"),
    *("max-num-partial-prefills", "max-long-partial-prefills", "long-prefill-token-threshold"),
)
_OF_TRANSFERS = ("kv-transfer-config", "prefill-workers", "decode-workers", "role")


def settled_config(values: Values, model: Checkpoint) -> dict[str, Any]:
    """Returns config.json with the values of flags."""
    return merge_patch(model.config, config_overrides(values))


def task_of(values: Values, model: Checkpoint) -> str:
    """Returns the task of the model. Raises ConfigError for one that it cannot have."""
    return settle_task(values, settled_config(values, model), model.modules_folder)


def worker_pooling_fields(values: Values, model: Checkpoint) -> dict[str, Any]:
    """Returns WorkerConfig's fields of a pooling task; {} for a model that generates text. Raises ConfigError."""
    task = task_of(values, model)
    given = values.maybe("override-pooler-config", dict)
    if task == GENERATE:
        if given:
            raise ConfigError(
                f"{values.where('override-pooler-config')}: this model generates text; --task embed makes vectors of it"
            )
        return {}
    config = settled_config(values, model)
    _check_flags(values, task, config)
    if config.get("architectures"):
        _check(values, model, task, config)
    fields: dict[str, Any] = {"task": task, "max_model_len": _length(values, model, config)}
    fields["has_pair_template"] = pair_template(values, model) is not None
    return fields | ({"pooler_config": msgspec.json.encode(given).decode()} if given else {})


def pair_template(values: Values, model: Checkpoint) -> str | None:
    """Returns the template that renders pairs of texts for a reranker. Raises ConfigError."""
    of_tokenizer = model.tokenizer_path if model.tokenizer_path.is_dir() else model.path
    config, given = settled_config(values, model), chat_template(values)
    return choose_pair_template(task_of(values, model), config, model.modules_folder, of_tokenizer, given)


def message_settings(values: Values, model: Checkpoint) -> MessageSettings:
    """Returns how texts become messages of the chat template. Raises ConfigError if there is none."""
    if task_of(values, model) == GENERATE or not model.path.is_dir():
        return MessageSettings()
    modules = read_modules(model.modules_folder)
    folder = modules.transformer_folder if modules is not None else ""
    found = read_settings(model.modules_folder, folder).messages
    of_tokenizer = model.tokenizer_path if model.tokenizer_path.is_dir() else model.path
    if found.writes_texts and chat_template(values) is None and "default" not in chat_templates(of_tokenizer):
        raise ConfigError(
            f"{model.path}: by sentence_bert_config.json (modality_config) the chat template writes texts as messages, "
            "and there is none; --chat-template names one"
        )
    return found


def pooling_notes(values: Values, model: Checkpoint) -> list[str]:
    """Returns lines about a pooling model: how texts are written if not as they are, and flags without an effect."""
    task = task_of(values, model)
    if task == GENERATE:
        return []
    names = (*_OF_DECODING, *_OF_KV) if is_encoder(values, model) else _OF_DECODING
    given = [values.where(name) for name in names if values.is_given(name)]
    written = message_settings(values, model).writes_texts
    return [
        *(["texts: written as messages by the chat template (sentence_bert_config.json)"] if written else []),
        *([f"{', '.join(given)}: no effect with the task {task}"] if given else []),
    ]


def is_encoder(values: Values, model: Checkpoint) -> bool:
    """Whether the model has no KV cache. One whose class is not known is none."""
    config = settled_config(values, model)
    return bool(config.get("architectures")) and not has_kv(config)


def has_kv(config: dict[str, Any]) -> bool:
    """Whether tokens of the model attend to earlier ones alone, whose keys and values are kept."""
    name = str(config["architectures"][0])
    is_encoder = name.startswith(("Bert", "Roberta", "XLMRoberta", "ModernBert"))
    return not is_encoder and not sees_both_sides(config)


def _check_flags(values: Values, task: str, config: dict[str, Any]) -> None:
    """Raises ConfigError for flags that workers with this task cannot follow."""
    for name in _OF_TRANSFERS:
        if values.is_given(name) and values[name]:
            raise ConfigError(f"{values.where(name)}: with the task {task} no KV blocks are sent between workers")
    for name in (*adapters.ENABLING, *adapters.ENABLING_PROMPTS):
        if values[name]:
            raise ConfigError(f"{values.where(name)}: adapters are not built yet with the task {task}")
    num_stages = values.get("pipeline-parallel-size", int)
    if num_stages > 1 and values["worker-cls"] != "mock" and config.get("architectures") and not has_kv(config):
        where = f"{values.where('pipeline-parallel-size')} {num_stages}"
        raise ConfigError(f"{where}: not built yet with {config['architectures'][0]}, an encoder runs in one stage")


def _check(values: Values, model: Checkpoint, task: str, config: dict[str, Any]) -> None:
    """Raises ConfigError if flags and folder contradict each other."""
    kind = OutputKind.CLASSES if task == PoolingTask.SCORE else first_kind(config)
    modules = read_modules(model.modules_folder)
    if modules is not None and modules.logit_score is not None:
        modules = None
    outputs = num_outputs(task, kind, config)
    sentences = read_settings(model.modules_folder, modules.transformer_folder if modules is not None else "")
    choice = choose_pooling(
        default_pooling(kind, has_kv=has_kv(config), config=config),
        hidden_size(config),
        modules,
        read_overrides(values.maybe("override-pooler-config", dict) or {}),
        num_outputs=outputs,
        vocab_size=config.get("vocab_size"),
        truncate_dim=sentences.truncate_dim,
    )
    settle_activation(task, kind, config, outputs or 1, model.modules_folder, choice.softmax)


def _length(values: Values, model: Checkpoint, config: dict[str, Any]) -> int | None:
    """The most tokens of a text: --max-model-len, else that of the folder. None: as many as config.json allows."""
    asked = context_limit(values, model.config)
    if asked is not None or not model.path.is_dir():
        return asked
    modules = read_modules(model.modules_folder)
    most = read_settings(model.modules_folder, modules.transformer_folder if modules is not None else "").max_seq_length
    usable = longest_sequence(config, {}, values.get("model-impl", str))
    return most if most is None or usable is None else min(most, usable)
