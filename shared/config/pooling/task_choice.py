"""Settles the task of a model: --task, --runner and --convert, or what its architecture and folder are for."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blockyard.shared.config.parsed_flags import Values
from blockyard.shared.config.pooling.activations import num_labels
from blockyard.shared.config.pooling.output_kinds import OutputKind, output_kind, sees_both_sides
from blockyard.shared.config.pooling.sentence_modules import read_modules
from blockyard.shared.errors import ConfigError
from blockyard.shared.messages import PoolingTask

GENERATE = "generate"
CLASSIFIER_TOKENS = "classifier_from_token"  # of config.json: a language model that compares two tokens
_OTHER_NAMES = {"embedding": "embed"}
_BY_KIND = {  # the first one is that of `auto`
    OutputKind.NONE: ("embed",),
    OutputKind.TOKENS: (GENERATE, "embed"),
    OutputKind.CLASSES: ("classify",),
    OutputKind.TOKEN_CLASSES: ("classify",),
    OutputKind.REWARD: ("reward",),
    OutputKind.STEP_REWARD: ("reward",),
}
_CONVERTED = {"embed": "embed", "classify": "classify", "reward": "reward"}


def tasks_of(config: Mapping[str, Any], folder: Path) -> tuple[str, ...]:
    """Returns the tasks that a model can have, first the one of `auto`.

    config: config.json with --hf-overrides. folder: of the model. Raises ConfigError for a wrong modules.json.
    """
    names = config.get("architectures")
    kind = output_kind(str(names[0])) if isinstance(names, list) and names else OutputKind.TOKENS
    modules = read_modules(folder)
    if config.get(CLASSIFIER_TOKENS) is not None or (modules is not None and modules.logit_score is not None):
        return ("score",)
    if kind is OutputKind.TOKENS and sees_both_sides(config):
        return ("embed",)
    if kind is OutputKind.TOKENS and modules is not None:
        return ("embed", GENERATE)
    if kind is OutputKind.CLASSES and num_labels(config) == 1:
        return ("score", "classify", "reward")
    return _BY_KIND[kind]


def settle_task(values: Values, config: Mapping[str, Any], folder: Path) -> str:
    """Returns `generate` or a value of `PoolingTask`. Raises ConfigError for one that the model cannot have."""
    possible = tasks_of(config, folder)
    asked, where = _asked(values, possible)
    if asked is None:
        return possible[0]
    if asked not in possible:
        names = config.get("architectures") or ["this model"]
        raise ConfigError(f"{where} {asked}: {names[0]} can only {_listed(possible)}")
    return asked


def _asked(values: Values, possible: tuple[str, ...]) -> tuple[str | None, str]:
    """The task of the flags, and the flag that says it; None: `auto`."""
    task = values.get("task", str)
    runner, convert = values.get("runner", str), values.get("convert", str)
    task = _OTHER_NAMES.get(task, task)
    converted = _CONVERTED.get(convert)
    if task != "auto":
        for name, contradicts in (
            ("runner", runner != "auto" and (runner == GENERATE) != (task == GENERATE)),
            ("convert", converted not in (None, task) and not (converted == "classify" and task == "score")),
        ):
            if contradicts:
                raise ConfigError(f"{values.where('task')} {task} and --{name} {values[name]}: which one?")
        return task, values.where("task")
    if converted is not None:
        if runner == GENERATE:
            raise ConfigError(f"{values.where('convert')} {convert} and --runner {runner}: which one?")
        of_score = converted == "classify" and possible[0] == "score"
        return "score" if of_score else converted, values.where("convert")
    if runner == GENERATE:
        return GENERATE, values.where("runner")
    if runner == "pooling":
        found = next((one for one in possible if one != GENERATE), None)
        return found, values.where("runner")
    return None, ""


def _listed(tasks: tuple[str, ...]) -> str:
    return " or ".join(tasks)


def pooling_task(task: str) -> PoolingTask | None:
    """None: the model generates text."""
    return None if task == GENERATE else PoolingTask(task)
