"""Ratios, floors and bars of the table."""

import pytest

from blockyard.services.bench.parallel.rows import BALANCE, BARS, KILL, START, read_floor_ms, row_of, sum_rows
from blockyard.services.bench.suite import shapes
from blockyard.shared.config.text_part import text_part
from blockyard.shared.messages import SumTime

VALUES = {
    ("one", "itl-one"): 4.0,
    ("tp2", "itl-one"): 2.6,
    ("one", "rate"): 1000.0,
    ("pp2", "rate"): 1600.0,
    ("tp2", START): 12.0,
    ("tp2", KILL): 15.0,
    ("pp2", "idle"): 0.04,
    ("dp2ep2", "kv-blocks"): 100.0,
    ("ep2", BALANCE): 1.2,
}


def row(layout: str, item: str, *, of_mixture: bool = False) -> str:
    return str(row_of(item, layout, "what", VALUES, of_mixture=of_mixture))


def test_a_figure_is_compared_with_what_its_bar_is_of() -> None:
    assert row("tp2", "itl-one") == "| itl-one: what | tp2 | 2.6 ms | one: 4 ms | 0.650 | 0.5 | 0.68 |"
    assert row("pp2", "rate") == (
        "| rate: what | pp2 | 1,600 tokens/s | one: 1,000 tokens/s | 1.600 | 2 | 1.7 (missed) |"
    )
    assert row("tp2", KILL) == "| kill: what | tp2 | 15 s | start: 12 s | 1.250 | 1 | 1.2 (missed) |"
    assert row("ep2", BALANCE) == "| balance: what | ep2 | 1.2 |  |  | 1 | 1.15 (missed) |"
    assert row("pp2", "idle") == "| idle: what | pp2 | 0.04 |  |  | 0 | 0.06 |"


def test_a_figure_without_its_base_has_no_ratio_and_misses_nothing() -> None:
    assert row("dp2ep2", "kv-blocks") == "| kv-blocks: what | dp2ep2 | 100 blocks |  |  |  | 1.8 |"
    assert row("one", "itl-one") == "| itl-one: what | one | 4 ms |  |  |  |  |"


def test_mixtures_have_other_bars() -> None:
    assert row("tp2", "itl-one", of_mixture=True).endswith("| 0.5 | 0.85 |")


def test_bars_are_no_tighter_than_floors() -> None:
    for bar in BARS.values():
        assert bar.floor is None or (bar.bar <= bar.floor if bar.more else bar.bar >= bar.floor)


def test_sums_are_compared_with_nccl() -> None:
    times = [SumTime("NCCL", 16 << 10, 9e-6, 12e-6), SumTime("own", 16 << 10, 6e-6, 7e-6)]
    assert [str(one) for one in sum_rows("tp2", times, has_bars=True)] == [
        "| all-reduce: 16 KB, NCCL | tp2 | 9 us |  |  | 3 us (0.33 of it) | 8 (missed) |",
        "| all-reduce: 16 KB, NCCL, with residual and norm | tp2 | 12 us |  |  | 3 us (0.25 of it) | 10 (missed) |",
        "| all-reduce: 16 KB, own | tp2 | 6 us |  |  | 3 us (0.50 of it) | 8 |",
        "| all-reduce: 16 KB, own, with residual and norm | tp2 | 7 us |  |  | 3 us (0.43 of it) | 10 |",
        "| all-reduce: 16 KB, own to NCCL | tp2 | 6 us | NCCL: 9 us | 0.667 |  | 0.75 |",
    ]
    assert "8" not in str(sum_rows("tp4", times, has_bars=False)[0]).split("|")[-2]


@pytest.mark.parametrize(("name", "floor_ms"), [("llama-3.1-8b", 2.5), ("llama-3.3-70b", 23.2)])
def test_the_floor_of_a_dense_model_is_the_read_of_its_weights(name: str, floor_ms: float) -> None:
    assert read_floor_ms(text_part(shapes.read(name)), 2, 3.0e12) == pytest.approx(floor_ms, rel=0.02)


def test_mixtures_have_no_such_floor() -> None:
    assert read_floor_ms(text_part(shapes.read("qwen3-30b-a3b")), 2, 3.0e12) is None
