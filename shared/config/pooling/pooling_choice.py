"""Decides how a model pools: --override-pooler-config goes before the folder, and that before the task's default."""

from collections.abc import Mapping
from typing import Any

import msgspec

from blockyard.shared.config.pooling.modes import PoolingMode
from blockyard.shared.config.pooling.pooler_config import FLAG, PoolerOverrides
from blockyard.shared.config.pooling.sentence_modules import (
    DenseModule,
    NormalizeModule,
    SentenceModules,
    width_behind,
)
from blockyard.shared.errors import ConfigError

MATRYOSHKA_KEYS = ("is_matryoshka", "matryoshka_dimensions")


class PoolingChoice(msgspec.Struct, frozen=True, kw_only=True):
    """How a model makes a vector of hidden states."""

    modes: tuple[PoolingMode, ...]
    source: str  # the flag or file that said it, for the start-up line
    width: int  # numbers of the vector
    dense: tuple[DenseModule, ...] = ()
    normalize: bool = False  # at the end
    # places among `dense` before which the vector is normalized, too
    normalize_before: tuple[int, ...] = ()
    softmax: bool | None = None  # of classes or tokens; None: as the task has it
    step_tag_id: int | None = None
    returned_token_ids: tuple[int, ...] | None = None
    include_prompt: bool = True
    truncate_dim: int | None = None  # numbers that are kept behind everything else; None: all

    def describe(self) -> str:
        """Returns the start-up line."""
        names = "+".join(mode.name for mode in self.modes)
        dense = "".join(f", dense {one.in_features} to {one.out_features}" for one in self.dense)
        normalized = "normalized" if self.normalize else "not normalized"
        cut, when = ("", "") if self.truncate_dim is None else (" (truncate_dim)", " before the cut")
        numbers = f"{self.width} number{'' if self.width == 1 else 's'}"
        return f"pooling: {names} ({self.source}){dense}, {numbers}{cut}, {normalized}{when}"


def choose_pooling(
    default: PoolingMode,
    hidden_size: int,
    modules: SentenceModules | None,
    overrides: PoolerOverrides,
    *,
    num_outputs: int | None = None,
    vocab_size: int | None = None,
    truncate_dim: int | None = None,
) -> PoolingChoice:
    """Returns how results are made.

    default: of the model's kind. hidden_size: of its hidden states. num_outputs: of the output layer, behind the
    pooling; None: the model makes vectors. vocab_size: None: not known. truncate_dim: of config_sentence_transformers.
    Raises ConfigError if the modules do not fit the model or the flag contradicts itself or the model.
    """
    _check_overrides(overrides, num_outputs, vocab_size)
    found = _of_folder(default, hidden_size, modules, normalizes=num_outputs is None)
    if overrides.mode is not None:
        joins = len(found.modes) > 1
        dense = () if overrides.mode.is_of_tokens and joins else found.dense
        if dense and joins:
            raise ConfigError(
                f"{FLAG}: pooling_type {overrides.mode.name} makes {hidden_size} numbers, and the dense layer of the "
                f"folder reads {dense[0].in_features}"
            )
        width = found.width if dense else hidden_size
        found = msgspec.structs.replace(
            found,
            modes=(overrides.mode,),
            source=FLAG,
            dense=dense,
            width=width,
            normalize_before=found.normalize_before if dense else (),
        )
    if overrides.normalize is not None:
        found = msgspec.structs.replace(found, normalize=overrides.normalize)
    is_step = found.modes == (PoolingMode.STEP,)
    if overrides.step_tag_id is not None and not is_step:
        raise ConfigError(f"{FLAG}: step_tag_id has an effect only with pooling_type STEP")
    width = found.width if num_outputs is None else num_outputs
    if overrides.returned_token_ids is not None:
        width = len(overrides.returned_token_ids)
    if num_outputs is not None or truncate_dim is None or truncate_dim >= width:
        truncate_dim = None  # of vectors that are as short, too
    return msgspec.structs.replace(
        found,
        width=truncate_dim or width,
        truncate_dim=truncate_dim,
        softmax=overrides.softmax,
        step_tag_id=overrides.step_tag_id,
        returned_token_ids=overrides.returned_token_ids,
    )


def _check_overrides(overrides: PoolerOverrides, num_outputs: int | None, vocab_size: int | None) -> None:
    """Raises ConfigError for fields that the model has no use for, and for ids that it does not have."""
    of_others = ("softmax", "returned_token_ids") if num_outputs is None else ("normalize",)
    if wrong := [name for name in of_others if getattr(overrides, name) is not None]:
        kind = "scores and classes" if num_outputs is None else "vectors"
        raise ConfigError(f"{FLAG}: {wrong[0]} is for {kind}, which this model does not make")
    returned, tag = overrides.returned_token_ids, overrides.step_tag_id
    if returned is not None and num_outputs is not None and (not returned or max(returned) >= num_outputs):
        raise ConfigError(f"{FLAG}: returned_token_ids {list(returned)} are not some of the {num_outputs} outputs")
    if tag is not None and vocab_size is not None and tag >= vocab_size:
        raise ConfigError(f"{FLAG}: step_tag_id {tag} is outside the vocabulary of {vocab_size}")


def _of_folder(
    default: PoolingMode, hidden_size: int, modules: SentenceModules | None, *, normalizes: bool
) -> PoolingChoice:
    if modules is None or modules.pooling is None:
        if modules is not None and normalizes:
            raise ConfigError("modules.json lists no Pooling, so nothing makes a vector")
        source = "default of the model"
        return PoolingChoice(modes=(default,), source=source, width=hidden_size, normalize=normalizes)
    pooling = modules.pooling
    if pooling.width != hidden_size:
        raise ConfigError(
            f"modules.json: the Pooling is for hidden states of {pooling.width} numbers, config.json means "
            f"{hidden_size}"
        )
    dense: list[DenseModule] = []
    before: list[int] = []
    for module in modules.behind:
        if isinstance(module, NormalizeModule):
            before.append(len(dense))
        else:
            dense.append(module)
    return PoolingChoice(
        modes=pooling.modes,
        source="modules.json",
        width=width_behind(modules),
        dense=tuple(dense),
        normalize=len(dense) in before,
        normalize_before=tuple(sorted({place for place in before if place < len(dense)})),
        include_prompt=pooling.include_prompt,
    )


def dimensions_problem(dimensions: int, width: int, config: Mapping[str, Any]) -> str | None:
    """Says why a vector cannot be cut to so many numbers; None: it can.

    width: of the model's vector. config: config.json with --hf-overrides, which says whether the model is trained so.
    """
    if dimensions == width:
        return None
    if dimensions < 1 or dimensions > width:
        return f"dimensions {dimensions} is not between 1 and the model's {width}"
    trained = config.get("matryoshka_dimensions")
    if isinstance(trained, list):
        if dimensions in trained:
            return None
        return f"dimensions {dimensions} is not one of those the model is trained for: {', '.join(map(str, trained))}"
    if config.get("is_matryoshka"):
        return None
    return (
        f"dimensions {dimensions}: this model makes vectors of {width} numbers and does not say that they can be cut; "
        """--hf-overrides '{"is_matryoshka": true}' says so"""
    )
