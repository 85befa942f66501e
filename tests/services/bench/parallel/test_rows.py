"""Ratios, floors and bars of the table."""

import pytest

from blockyard.services.bench.parallel.items import KILL, START
from blockyard.services.bench.parallel.layouts import ONE, read_layout
from blockyard.services.bench.parallel.rows import (
    BARS,
    ParallelRow,
    best_rows,
    idle_share,
    read_floor_ms,
    row_of,
    sum_floor_us,
    sum_rows,
)
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
    ("ep2", "balance"): 1.2,
}


def row(layout: str, item: str, *, of_mixture: bool = False) -> str:
    return str(row_of(item, layout, "what", VALUES, "8b", of_mixture=of_mixture))


def test_a_figure_is_compared_with_what_its_bar_is_of() -> None:
    assert row("tp2", "itl-one") == "| 8b | itl-one: what | tp2 | 2.6 ms | one: 4 ms | 0.650 | 0.5 | 0.68 | met |"
    assert row("pp2", "rate") == (
        "| 8b | rate: what | pp2 | 1,600 tokens/s | one: 1,000 tokens/s | 1.600 | 2 | 1.7 | missed |"
    )
    assert row("tp2", KILL) == "| 8b | kill: what | tp2 | 15 s | start: 12 s | 1.250 | 1 | 1.2 | missed |"
    assert row("ep2", "balance") == "| 8b | balance: what | ep2 | 1.2 |  |  | 1 | 1.15 | missed |"
    assert row("pp2", "idle") == "| 8b | idle: what | pp2 | 0.04 |  |  | 0 | 0.06 | met |"


def test_a_figure_without_its_base_has_no_ratio_and_no_bar() -> None:
    assert row("dp2ep2", "kv-blocks") == "| 8b | kv-blocks: what | dp2ep2 | 100 blocks |  |  |  |  |  |"
    assert row("one", "itl-one") == "| 8b | itl-one: what | one | 4 ms |  |  |  |  |  |"


def test_a_figure_that_failed_says_why_in_one_line() -> None:
    failed = ParallelRow("8b", "rate", "tp2", "what", problem="failed: it ended\n\nand more\nout of memory\n")
    assert str(failed) == "| 8b | rate: what | tp2 | failed: it ended out of memory | | | | | not measured |"


def test_of_a_mixture_the_best_layout_has_the_bar() -> None:
    values = {("one", "itl-one"): 4.0, ("tp2", "itl-one"): 3.2, ("ep2", "itl-one"): 3.5}
    rows = [row_of("itl-one", name, "what", values, "moe", of_mixture=True) for name in ("one", "tp2", "ep2")]
    assert [one.bar for one in rows] == [None] * 3 and rows[1].ratio == 0.8
    assert [str(one) for one in best_rows(rows, [ONE, read_layout("tp2"), read_layout("ep2")])] == [
        "| moe | itl-one: what | tp2, the best of 2 | 3.2 ms | one: 4 ms | 0.800 | 0.5 | 0.85 | met |"
    ]


def test_of_four_gpus_the_highest_rate_is_the_best() -> None:
    values = {("one", "rate"): 10.0, ("ep4", "rate"): 20.0, ("dp4ep4", "rate"): 25.0}
    rows = [row_of("rate", name, "what", values, "moe", of_mixture=True) for name in ("one", "ep4", "dp4ep4")]
    [best] = best_rows(rows, [ONE, read_layout("ep4"), read_layout("dp4ep4")])
    assert (best.layout, best.ratio, best.is_met) == ("dp4ep4, the best of 2", 2.5, False)


def test_a_stage_is_idle_where_its_steps_do_not_fill_the_time() -> None:
    # 256 run, 128 in a step of 8 ms on one GPU, so of 4 ms in a stage: 32,000 tokens/s at best
    assert idle_share(8.0, 32_000.0, 256) == pytest.approx(0.0)
    assert idle_share(8.0, 24_000.0, 256) == pytest.approx(0.25)


def test_bars_are_no_tighter_than_floors() -> None:
    for bar in BARS.values():
        assert bar.floor is None or (bar.bar <= bar.floor if bar.more else bar.bar >= bar.floor)


TIMES = [SumTime("NCCL", 16 << 10, 9e-6, 12e-6), SumTime("own", 16 << 10, 6e-6, 11e-6)]


def test_sums_are_compared_with_nccl() -> None:
    assert [str(one) for one in sum_rows("tp2", 2, TIMES, "8b")] == [
        "| 8b | all-reduce: 16 KB, NCCL | tp2 | 9 us |  |  | 3 us (0.33 of it) |  |  |",
        "| 8b | all-reduce: 16 KB, NCCL, with residual and norm | tp2 | 12 us |  |  | 3 us (0.25 of it) |  |  |",
        "| 8b | all-reduce: 16 KB, own | tp2 | 6 us |  |  | 3 us (0.50 of it) | 8 | met |",
        "| 8b | all-reduce: 16 KB, own, with residual and norm | tp2 | 11 us |  |  | 3 us (0.27 of it) | 10 | missed |",
        "| 8b | all-reduce: 16 KB, own to NCCL | tp2 | 6 us | NCCL: 9 us | 0.667 |  | 0.75 | met |",
    ]


def test_sums_of_four_ranks_have_bars_of_their_own_and_those_on_the_cpu_none() -> None:
    bars = [[one.bar and one.bar.bar for one in sum_rows("tp4", num, TIMES, "8b")[2:]] for num in (4, 0)]
    assert bars == [[10.0, 12.0, None], [None, None, None]]
    assert sum_rows("tp4", 0, TIMES, "8b")[2].floor is None


def test_two_ranks_send_a_part_once_and_four_one_and_a_half_times() -> None:
    assert sum_floor_us(64 << 20, 2) == pytest.approx(172, rel=0.01)
    assert sum_floor_us(64 << 20, 4) == pytest.approx(1.5 * 172, rel=0.01)


@pytest.mark.parametrize(("name", "floor_ms"), [("llama-3.1-8b", 2.5), ("llama-3.3-70b", 23.2)])
def test_the_floor_of_a_dense_model_is_the_read_of_its_weights(name: str, floor_ms: float) -> None:
    assert read_floor_ms(text_part(shapes.read(name)), 2, 3.0e12) == pytest.approx(floor_ms, rel=0.02)


def test_mixtures_have_no_such_floor() -> None:
    assert read_floor_ms(text_part(shapes.read("qwen3-30b-a3b")), 2, 3.0e12) is None
