"""Candidates, the choice among them, and the file that keeps it."""

import logging
from pathlib import Path

import pytest

from blockyard.services.gpu_worker.linear_tuning import kernel_configs as picker
from blockyard.services.gpu_worker.linear_tuning.kernel_configs import LIBRARY, Choice, Layer, Plan

FEW, TILES = Plan("few", 4), Plan("tiles", 64, 16)
LAYERS = [Layer(4096, 6144, 32), Layer(4096, 128256, 1)]


@pytest.mark.parametrize(
    ("times", "chosen"),
    [
        ({LIBRARY: 4.0, FEW: 3.0, TILES: 3.5}, FEW),
        ({LIBRARY: 4.0, FEW: 3.9, TILES: 3.8}, TILES),
        ({LIBRARY: 4.0, FEW: 3.99}, LIBRARY),  # noise
        ({LIBRARY: 4.0, FEW: 5.0}, LIBRARY),
        ({LIBRARY: 4.0}, LIBRARY),
    ],
)
def test_the_quickest_is_picked_the_library_when_in_doubt(times: dict[Plan, float], chosen: Plan) -> None:
    assert picker.pick(times) == chosen


def test_a_set_that_is_slower_as_a_whole_is_not_picked() -> None:
    library, ours = [LIBRARY, LIBRARY], [FEW, TILES]
    assert picker.pick_set([(library, 4.0), ([FEW, LIBRARY], 4.1), (ours, 3.7)]) == ours
    assert picker.pick_set([(library, 4.0), (ours, 4.1)]) == library
    assert picker.pick_set([(library, 4.0), (ours, 3.99)]) == library


def test_what_is_tried_next() -> None:
    times = {LIBRARY: 9.0, FEW: 3.0, TILES: 2.0, **{Plan("few", i): float(i) for i in (4, 5, 6)}}
    assert picker.next_best(times, TILES) == [FEW, Plan("few", 5), Plan("few", 6), LIBRARY]
    assert picker.next_best({LIBRARY: 1.0, TILES: 2.0}, LIBRARY) == [TILES]
    assert picker.own({LIBRARY: 1.0, FEW: 3.0, TILES: 2.0}) == TILES
    assert picker.own({LIBRARY: 1.0}) == LIBRARY


def test_candidates_fit_their_rows() -> None:
    layer = Layer(4096, 6144, 32)
    assert {plan.kernel for plan in picker.candidates(layer, 1, 2, 132)} == {"few"}
    assert {plan.kernel for plan in picker.candidates(layer, 4, 2, 132)} == {"few", "tiles"}
    for rows in (3, 8, 16, 17, 48, 64, 100, 256):
        plans = picker.candidates(layer, rows, 2, 132)
        assert plans
        assert len(set(plans)) == len(plans) <= 12, "each costs a start its time"
        assert all(plan.kernel == "tiles" for plan in plans)
        assert all(plan.row_tile >= 16 for plan in plans)
        assert all(layer.ins // plan.in_tile // plan.split >= picker.FEWEST_STEPS for plan in plans)
        assert any(plan.row_tile >= min(rows, 128) for plan in plans)
    assert picker.candidates(layer, 257, 2, 132) == []
    assert picker.candidates(layer, 1, 4, 132) == []
    assert picker.candidates(Layer(4097, 6144, 1), 16, 2, 132) == [], "rows that cannot be copied by descriptor"


def test_small_layers_are_split_until_all_processors_are_busy() -> None:
    shape = (64, 16, 128, 5, 4)  # 100 KiB: two programs a processor
    assert picker.splits(Layer(4096, 4096, 1), 16, shape, 2, 132) == [1, 2, 4]
    assert picker.splits(Layer(4096, 128256, 1), 16, shape, 2, 132) == [1]
    assert picker.splits(Layer(512, 64, 1), 16, shape, 2, 132) == [1], "no part is shorter than three steps"


def test_a_frozen_plan_follows_from_the_layer_alone() -> None:
    plan = picker.frozen_plan(Layer(4096, 4096, 32), 2, 132)
    assert plan.kernel == "tiles"
    assert plan.split == 4
    assert picker.frozen_plan(Layer(4096, 4096, 32), 4, 132) == LIBRARY


def test_a_table_comes_back(tmp_path: Path) -> None:
    path = picker.table_path("NVIDIA H200", ("torch2.11.0+cu130",), environ={"XDG_CACHE_HOME": str(tmp_path)})
    assert path == tmp_path / "blockyard" / "linear-NVIDIA-H200-torch2.11.0+cu130.json"
    assert picker.read_table(path) == []
    choices = [Choice(LAYERS, "bfloat16", 1, [FEW, LIBRARY]), Choice(LAYERS, "bfloat16", 16, [TILES, LIBRARY])]
    picker.write_table(path, choices)
    assert picker.read_table(path) == choices
    assert [f.name for f in path.parent.iterdir()] == [path.name]
    assert picker.find(choices, LAYERS, "bfloat16", 16) == [TILES, LIBRARY]
    assert picker.find(choices, LAYERS, "float16", 16) is None
    assert picker.find(choices, LAYERS, "bfloat16", 8) is None
    assert picker.find(choices, LAYERS[:1], "bfloat16", 16) is None


def test_what_is_measured_again_replaces_what_was() -> None:
    old = [Choice(LAYERS, "bfloat16", 1, [FEW, LIBRARY]), Choice(LAYERS[:1], "bfloat16", 1, [FEW])]
    new = [Choice(LAYERS, "bfloat16", 1, [LIBRARY, LIBRARY])]
    assert picker.merge(old, new) == [old[1], new[0]]


@pytest.mark.parametrize("content", [b"", b"{", b'{"edition": 1}', b'{"edition": "x", "choices": []}', b"\xff\x00"])
def test_a_broken_table_is_measured_anew(content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "table.json"
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert picker.read_table(path) == []
    assert [r.message for r in caplog.records if "measured anew" in r.message]
    picker.write_table(path, [Choice(LAYERS, "bfloat16", 1, [FEW, LIBRARY])])
    assert len(picker.read_table(path)) == 1


def test_another_edition_is_measured_anew(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_bytes(b'{"edition": 0, "choices": []}')
    assert picker.read_table(path) == []


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "blockyard").write_text("a file where the folder belongs")
    with caplog.at_level(logging.WARNING):
        picker.write_table(tmp_path / "blockyard" / "table.json", [])
    assert len(caplog.records) == 1
    assert "cannot be written" in caplog.records[0].message
    assert picker.read_table(tmp_path / "blockyard" / "table.json") == []
