"""The tables: their rows have what they are compared with, and servers the graphs that loads need."""

import pytest

from blockyard.services.bench.parallel.items import ITEMS, graph_sizes, has_item, longest
from blockyard.services.bench.parallel.layouts import ONE, read_layout
from blockyard.services.bench.parallel.measures import ParallelSizes
from blockyard.services.bench.parallel.rows import BARS, BEST_BARS, SUM_BARS, has_experts
from blockyard.services.bench.parallel.tables import LAYOUTS, TABLES, ModelPlan, plans_of
from blockyard.services.bench.suite import shapes
from blockyard.shared.errors import ConfigError

SIZES = ParallelSizes()
EVERY = [plan for name in TABLES for plan in plans_of(name, [], [])]


@pytest.mark.parametrize("plan", EVERY, ids=lambda plan: plan.model)
def test_a_row_is_measured_behind_its_base(plan: ModelPlan) -> None:
    is_mixture = plan.model != "demo" and has_experts(shapes.read(plan.model))
    before = set[tuple[str, str]]()
    for layout, names in plan.items:
        for name in names:
            assert has_item(layout, name)
            bar = BARS.get((layout.name, name))
            base = ONE.name if is_mixture and (layout.num_gpus, name) in BEST_BARS else bar.base if bar else ""
            if base and layout != ONE and (base != ONE.name or ONE in plan.layouts):
                assert ((layout.name, base) if base in ITEMS else (base, name)) in before
            before.add((layout.name, name))


def test_each_bar_is_of_a_row_of_the_tables() -> None:
    rows = {(layout.name, name) for plan in EVERY for layout, names in plan.items for name in names}
    assert {*BARS} <= rows
    assert {num_ranks for num_ranks, _ in SUM_BARS} == {
        layout.num_gpus for plan in EVERY for layout, names in plan.items if "all-reduce" in names
    }


def test_words_choose_rows_of_a_table() -> None:
    [plan] = plans_of("four-gpus", ["offline"], [])
    assert (plan.model, [layout.name for layout in plan.layouts], plan.names) == (
        "llama-3.3-70b",
        ["tp2", "tp4"],
        ["offline"],
    )
    assert [plan.model for plan in plans_of("two-gpus", [], ["pp2"], "demo")] == ["demo"]
    with pytest.raises(ConfigError, match="two-gpus has no row of all of these: kill, pp2"):
        plans_of("two-gpus", ["kill"], ["pp2"])
    [plan] = plans_of("two-gpus", ["itl-one"], [], models=["qwen3-30b-a3b"])
    assert [layout.name for layout in plan.layouts] == ["one", "tp2", "ep2"]
    with pytest.raises(ConfigError, match=r"--models qwen: the models of two-gpus are llama-3\.1-8b, "):
        plans_of("two-gpus", [], [], models=["qwen"])
    with pytest.raises(ConfigError, match="--models qwen: demo is not one of the tables"):
        plans_of("demo", [], [], models=["qwen"])


def test_of_a_model_the_usual_items_are_measured_where_there_are_any() -> None:
    [plan] = plans_of("demo", [], [])
    assert [layout.name for layout in plan.layouts] == [*LAYOUTS]
    assert not {"offline", "texts", "beside"} & {*plan.names}
    assert [layout.name for layout, names in plan.items if "idle" in names] == ["pp2"]
    with pytest.raises(ConfigError, match=r"^idel: no such item"):
        plans_of("demo", ["idel"], [])


def test_graphs_are_those_of_the_loads() -> None:
    assert graph_sizes(["itl-one", "ttft", "start"], ONE, SIZES) == [1]
    assert graph_sizes(["itl-one", "itl-some", "rate"], ONE, SIZES) == [1, 64, 72, 80, 256, 264, 272]
    assert graph_sizes(["rate"], read_layout("tp2pp2"), SIZES) == [1, 128, 136, 144, 256]
    assert graph_sizes(["offline"], read_layout("tp2"), SIZES) == [1, 128, 256, 384, 512, 640, 768, 776, 784]


def test_the_longest_sequence_of_the_items_has_room() -> None:
    assert longest(["itl-one", "ttft-long"], SIZES) > SIZES.long_prompt
    assert longest(["beside"], SIZES) > SIZES.prompt + 8
    assert longest(["offline"], SIZES) > 2000


def test_a_peer_is_measured_behind_what_it_is_compared_with() -> None:
    plans = plans_of("two-gpus", [], [], has_peer=True)
    assert [layout.name for layout in plans[0].layouts] == ["one", "tp2", "peer", "pp2"]
    assert not any("peer" in [layout.name for layout in plan.layouts] for plan in plans[1:])
    with pytest.raises(ConfigError, match=r"^--peer: it is compared with itl-one of tp2, which is not measured"):
        plans_of("four-gpus", [], [], has_peer=True)
