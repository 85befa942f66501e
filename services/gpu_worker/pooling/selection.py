"""Chooses how a worker's model pools: of its settings, config.json and the folder."""

from pathlib import Path
from typing import Any

import msgspec

from blockyard.services.gpu_worker.models.interface import Model
from blockyard.services.gpu_worker.pooling.output import PoolingOutput, make_output
from blockyard.shared.config.pooling.activations import settle_activation
from blockyard.shared.config.pooling.modes import PoolingMode
from blockyard.shared.config.pooling.output_kinds import default_pooling, default_step_tag, first_kind
from blockyard.shared.config.pooling.pooler_config import FLAG, read_overrides
from blockyard.shared.config.pooling.pooling_card import hidden_size
from blockyard.shared.config.pooling.pooling_choice import PoolingChoice, choose_pooling
from blockyard.shared.config.pooling.sentence_modules import SentenceModules, read_modules
from blockyard.shared.config.pooling.sentence_settings import read_settings
from blockyard.shared.config.services.worker import WorkerConfig
from blockyard.shared.errors import ConfigError


def modules_folder(config: WorkerConfig) -> Path:
    """Returns the folder of modules.json, if there is one."""
    return Path(config.modules_path or config.model_path)


def choose_output(config: WorkerConfig, settings: dict[str, Any], model: Model) -> tuple[PoolingChoice, PoolingOutput]:
    """Returns how the model pools, and what does it. settings: config.json. Raises ConfigError or LoadError."""
    folder, kind = modules_folder(config), first_kind(settings)
    try:
        values = msgspec.json.decode(config.pooler_config, type=dict[str, Any])
    except msgspec.MsgspecError as e:
        raise ConfigError(f"{FLAG} {config.pooler_config!r}: {e}") from e
    num_outputs = None if kind.makes_vectors else model.shape.num_outputs
    choice = choose_pooling(
        default_pooling(kind, has_kv=model.shape.has_kv, config=settings),
        hidden_size(settings),
        _modules(folder),
        read_overrides(values),
        num_outputs=num_outputs,
        vocab_size=model.shape.vocab_size,
        truncate_dim=read_settings(folder).truncate_dim,
    )
    if choice.modes == (PoolingMode.STEP,) and choice.step_tag_id is None:
        choice = msgspec.structs.replace(choice, step_tag_id=default_step_tag(settings))
    activation = settle_activation(config.task, kind, settings, num_outputs or 1, folder, choice.softmax)
    return choice, make_output(model, choice, folder, activation)


def _modules(folder: Path) -> SentenceModules | None:
    """A LogitScore makes a classifier of the model, which pools as classifiers do."""
    found = read_modules(folder)
    return None if found is not None and found.logit_score is not None else found
