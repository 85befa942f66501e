"""Decides the function that makes scores or classes of logits. It is applied once, in the worker."""

import enum
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blockyard.shared.config.pooling.output_kinds import OutputKind
from blockyard.shared.config.pooling.sentence_settings import read_settings
from blockyard.shared.errors import ConfigError


class Activation(enum.StrEnum):
    """Values are the names in torch.nn."""

    NONE = "Identity"
    SIGMOID = "Sigmoid"
    SOFTMAX = "Softmax"
    TANH = "Tanh"
    RELU = "ReLU"
    GELU = "GELU"
    SILU = "SiLU"


def num_labels(config: Mapping[str, Any]) -> int:
    """Returns the number of labels of config.json, by transformers' rules: its default is 2."""
    count, names = config.get("num_labels"), config.get("id2label")
    if isinstance(names, Mapping) and names:
        return len(names)
    return count if isinstance(count, int) and not isinstance(count, bool) and count > 0 else 2


def num_outputs(task: str, kind: OutputKind, config: Mapping[str, Any]) -> int | None:
    """Returns the numbers that the output layer makes of a row; None: the model makes vectors.

    config: config.json with --hf-overrides.
    """
    if kind.makes_vectors:
        return None
    if kind is OutputKind.STEP_REWARD:
        return 2
    return 1 if kind is OutputKind.REWARD or task == "score" else num_labels(config)


def settle_activation(
    task: str, kind: OutputKind, config: Mapping[str, Any], labels: int, folder: Path, softmax: bool | None
) -> Activation | None:
    """Returns the function of a model's outputs; None: it makes vectors, which have none.

    config: config.json with --hf-overrides. folder: of the model. softmax: of --override-pooler-config, which goes
    first. Raises ConfigError.
    """
    if kind.makes_vectors:
        return None
    if softmax is not None:
        return Activation.SOFTMAX if softmax else Activation.NONE
    if kind is OutputKind.REWARD or (task == "reward" and kind is OutputKind.CLASSES):
        return Activation.NONE
    if kind is OutputKind.STEP_REWARD:
        return Activation.SOFTMAX
    return choose_activation(config, labels, read_settings(folder).activation_fn)


def choose_activation(config: Mapping[str, Any], labels: int, of_folder: str | None = None) -> Activation:
    """Returns the function of the logits of a classifier.

    config: config.json with --hf-overrides. of_folder: activation_fn of config_sentence_transformers.json, which goes
    first. Then goes one of torch's that config names for sentence-transformers, then `problem_type`, then a sigmoid for
    one label and a softmax for several. Raises ConfigError for another's code.
    """
    if of_folder is not None:
        chosen = _read(of_folder, "config_sentence_transformers.json: activation_fn")
        if labels == 1 or chosen is not Activation.NONE:  # which the package writes for several labels if nobody chose
            return chosen
    inner = config.get("sentence_transformers")
    if isinstance(inner, Mapping) and "activation_fn" in inner:
        field, named = "sentence_transformers.activation_fn", inner["activation_fn"]
    else:
        field = "sbert_ce_default_activation_function"
        named = config.get(field)
    if named is not None:
        return _read(named, f"config.json: {field}")
    problem = config.get("problem_type")
    if problem == "regression":
        return Activation.NONE
    if problem == "multi_label_classification":
        return Activation.SIGMOID
    if problem == "single_label_classification" and labels > 1:
        return Activation.SOFTMAX
    return Activation.SIGMOID if labels == 1 else Activation.SOFTMAX


def _read(name: object, field: str) -> Activation:
    known = {one.value: one for one in Activation}
    last = name.rsplit(".", 1)[-1] if isinstance(name, str) and name.startswith("torch.nn.") else ""
    if last not in known:
        raise ConfigError(f"{field} {name!r} is not supported; torch.nn's {', '.join(known)} are")
    return known[last]
