"""Gives the weights of a transformers class the names, and the parts, that checkpoints have.

transformers renames weights as it loads them, and merges some: weights of single experts into one stack. Its table of
these conversions is read backwards here.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from blockyard.services.gpu_worker.loading.linear_spec import Cut
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.shared.errors import ConfigError

MERGED = ([MergeModulelist], [MergeModulelist, Concatenate])  # the operations of a stack of experts


def use_stored_names(causal: Any, table: WeightTable) -> None:
    """Moves the places of `table` from the names of the class to those of checkpoints. Raises ConfigError.

    The names of the class stay known: some checkpoints have them.
    """
    conversions = get_model_conversion_mapping(causal, add_legacy=False)
    causal._weight_conversions = [one for one in conversions if not isinstance(one, PrefixChange)]
    renamings = [one for one in causal._weight_conversions if isinstance(one, WeightRenaming)]
    converters = [one for one in causal._weight_conversions if isinstance(one, WeightConverter)]
    if not renamings and not converters:
        return
    shapes = {name: torch.empty(shape, device="meta") for name, shape in table.shapes().items()}
    stored = defaultdict[str, list[tuple[str, str | None]]](list)  # by the name of the class: names, and their patterns
    for name in revert_weight_conversion(causal, shapes):
        own, pattern = rename_source_key(name, renamings, converters)
        stored[own].append((name, pattern))
    by_pattern: dict[str | None, WeightConverter] = {
        pattern: one for one in converters for pattern in one.source_patterns
    }
    for own, found in stored.items():
        [*patterns] = dict.fromkeys(pattern for _, pattern in found)
        if patterns == [None]:
            if own != found[0][0]:
                table.rename(own, found[0][0])
        else:
            _convert(table, own, found, by_pattern[patterns[0]])


def _convert(table: WeightTable, own: str, found: Sequence[tuple[str, str | None]], converter: Any) -> None:
    """found: names in checkpoints with the patterns of the converter that they match."""
    operations, sources = [type(one) for one in converter.operations], converter.source_patterns
    if operations in MERGED and getattr(converter.operations[-1], "dim", 0) == len(operations) - 1:
        parts = [sorted((n for n, p in found if p == source), key=dot_natural_key) for source in sources]
        _split_stack(table, own, parts)
    else:
        names = ", ".join(one.__name__ for one in operations)
        raise ConfigError(f"checkpoints have {own} in a form that is not read here ({names})")


def _split_stack(table: WeightTable, own: str, parts: Sequence[Sequence[str]]) -> None:
    """own: a stack [experts, rows, in]. parts: for each product in it, the names of the experts' matrices."""
    place = table.places.pop(own)
    experts, rows, columns = place.shape
    if any(len(names) != experts for names in parts) or place.arrange is not None:
        raise ConfigError(f"checkpoints have {own} in another number of parts than {experts}")
    each, cut, here = rows // len(parts), place.cut, range(experts)  # the last: experts that this rank has
    assert cut is None or isinstance(cut, Cut)
    if cut is not None and cut.dim == 0:
        [here], cut = cut.ranges, None
    targets = place.target.chunk(len(parts), 1)
    for i, (names, target) in enumerate(zip(parts, targets, strict=True)):
        of_part = cut
        if cut is not None and cut.dim == -2:
            of_part = Cut(-2, (range(cut.ranges[i].start - i * each, cut.ranges[i].stop - i * each),))
        for expert, name in enumerate(names):
            if expert in here:
                table.place(name, target[expert - here.start], (each, columns), cut=of_part)
            else:
                table.leave_to_others(name)
    table.place_whole(own, place, [names[expert] for names in parts for expert in here])
