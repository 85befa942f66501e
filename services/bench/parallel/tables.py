"""The tables of two and of four GPUs: which figures of which models and layouts they compare, in their order.

A base of a ratio stands before what is compared with it.
"""

from collections.abc import Mapping, Sequence

import msgspec

from blockyard.services.bench.parallel.items import ITEMS, has_item, read_items
from blockyard.services.bench.parallel.layouts import Layout, read_layout
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


def plans_of(model: str, items: Sequence[str], layouts: Sequence[str], stand_in: str = "") -> list[ModelPlan]:
    """Returns what to measure of a model, or of those of a table.

    items, layouts: none for all of a table, or the usual ones of a model. stand_in: the model in place of a table's.
    Raises ConfigError.
    """
    chosen = read_items(items)
    if model not in TABLES:
        if stand_in:
            raise ConfigError(f"--stand-in {stand_in}: {model} is not one of the tables {', '.join(TABLES)}")
        found = [read_layout(name) for name in layouts or LAYOUTS]
        return [ModelPlan(model, [(one, [name for name in chosen if has_item(one, name)]) for one in found])]
    wanted = [read_layout(name) for name in layouts]
    plans = list[ModelPlan]()
    for table in TABLES[model]:
        of_layouts = {read_layout(name): names for name, names in table.items.items()}
        every = [(one, read_items(items or tuple(ITEMS), names)) for one, names in of_layouts.items()]
        kept = [(one, names) for one, names in every if names and (one in wanted or not wanted)]
        if kept:
            plans.append(ModelPlan(stand_in or table.model, kept))
    return plans
