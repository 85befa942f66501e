"""The tables of two and of four GPUs: which figures of which models and layouts they compare, in their order.

A base of a ratio stands before what is compared with it.
"""

from collections.abc import Mapping, Sequence

import msgspec

from blockyard.services.bench.parallel.items import ITEMS, PEER_ITEM, has_item, read_items
from blockyard.services.bench.parallel.layouts import PEER, PEER_OF, Layout, read_layout
from blockyard.shared.errors import ConfigError

LAYOUTS = ("one", "tp2", "pp2", "ep2", "dp2ep2")  # of a model that is named


class ModelTable(msgspec.Struct, frozen=True):
    """The rows of a model."""

    model: str
    items: Mapping[str, Sequence[str]]  # by layout


TABLES: dict[str, tuple[ModelTable, ...]] = {
    "two-gpus": (
        ModelTable(
            "llama-3.1-8b",
            {
                "one": ("itl-one", "itl-some", "itl-stage", "rate", "ttft", "ttft-long", "start"),
                "tp2": ("all-reduce", "itl-one", "itl-some", "rate", "ttft", "start", "kill"),
                "pp2": ("itl-one", "rate", "idle", "ttft-long"),
            },
        ),
        ModelTable("llama-3.3-70b", {"tp2": ("itl-one", "floor-one")}),
        ModelTable(
            "qwen3-30b-a3b",
            {
                "one": ("itl-one", "itl-some"),
                "tp2": ("itl-one", "itl-some"),
                "ep2": ("itl-one", "itl-some", "balance"),
            },
        ),
        ModelTable("deepseek-v2-lite", {"dp2": ("rate",), "tp2": ("kv-blocks",), "dp2ep2": ("rate", "kv-blocks")}),
    ),
    "four-gpus": (
        ModelTable(
            "llama-3.1-8b",
            {"one": ("itl-one", "rate"), "tp4": ("all-reduce", "itl-one"), "tp2pp2": ("rate",)},
        ),
        ModelTable("demo", {"tp4": ("texts",)}),
        ModelTable("qwen3-30b-a3b", {"one": ("rate",), "ep4": ("rate",), "dp4ep4": ("rate",)}),
        ModelTable(
            "llama-3.3-70b",
            {
                "dp2tp2": ("beside",),
                "apart-tp2": ("beside", "handover"),
                "tp2": ("offline",),
                "tp4": ("itl-one", "floor-one", "offline"),
            },
        ),
    ),
}  # the longest loads stand last


class ModelPlan(msgspec.Struct, frozen=True):
    """What to measure of a model, layout by layout."""

    model: str
    items: list[tuple[Layout, list[str]]]

    @property
    def names(self) -> list[str]:
        """All items, each once."""
        return list(dict.fromkeys(name for _, names in self.items for name in names))

    @property
    def layouts(self) -> list[Layout]:
        return [layout for layout, _ in self.items]


def plans_of(
    model: str,
    items: Sequence[str],
    layouts: Sequence[str],
    stand_in: str = "",
    *,
    models: Sequence[str] = (),
    has_peer: bool = False,
) -> list[ModelPlan]:
    """Returns what to measure of a model, or of those of a table.

    items, layouts: none for all of a table, or the usual ones of a model. stand_in: the model in place of a table's.
    models: those of a table; none for all.
    has_peer: PEER is measured behind PEER_OF. Raises ConfigError.
    """
    if model not in TABLES:
        if stand_in or models:
            flag = f"--stand-in {stand_in}" if stand_in else f"--models {','.join(models)}"
            raise ConfigError(f"{flag}: {model} is not one of the tables {', '.join(TABLES)}")
        plans = [_of_model(model, items, layouts)]
    else:
        plans = _of_table(model, items, layouts, models, stand_in)
    if has_peer:
        place, plan = _compared_with_peer(plans)
        plan.items.insert(place + 1, (PEER, [PEER_ITEM]))
    return plans


def _of_model(model: str, items: Sequence[str], layouts: Sequence[str]) -> ModelPlan:
    chosen = read_items(items)
    found = [read_layout(name) for name in layouts or LAYOUTS]
    return ModelPlan(model, [(one, [name for name in chosen if has_item(one, name)]) for one in found])


def _of_table(
    table: str, items: Sequence[str], layouts: Sequence[str], models: Sequence[str], stand_in: str
) -> list[ModelPlan]:
    known = [of_model.model for of_model in TABLES[table]]
    if unknown := [name for name in models if name not in known]:
        raise ConfigError(f"--models {unknown[0]}: the models of {table} are {', '.join(known)}")
    wanted = [read_layout(name) for name in layouts]
    plans = list[ModelPlan]()
    for of_model in TABLES[table]:
        of_layouts = {read_layout(name): names for name, names in of_model.items.items()}
        every = [(one, read_items(items or tuple(ITEMS), names)) for one, names in of_layouts.items()]
        kept = [(one, names) for one, names in every if names and (one in wanted or not wanted)]
        if kept and (of_model.model in models or not models):
            plans.append(ModelPlan(stand_in or of_model.model, kept))
    if not plans:
        raise ConfigError(f"{table} has no row of all of these: {', '.join((*models, *items, *layouts))}")
    return plans


def _compared_with_peer(plans: Sequence[ModelPlan]) -> tuple[int, ModelPlan]:
    """Returns the first plan that has PEER_OF, with its place there. Raises ConfigError if none has."""
    for plan in plans:
        for place, (layout, names) in enumerate(plan.items):
            if layout.name == PEER_OF and PEER_ITEM in names:
                return place, plan
    raise ConfigError(f"--peer: it is compared with {PEER_ITEM} of {PEER_OF}, which is not measured")
