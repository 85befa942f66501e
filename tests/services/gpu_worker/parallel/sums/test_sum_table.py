"""The choice of a way to sum over ranks, by size."""

from hypothesis import given
from hypothesis import strategies as st

from blockyard.services.gpu_worker.parallel.sums.sum_table import SumTable, SumWay, decode_table, quickest, same_way

WAYS = st.sampled_from(SumWay)
TABLE = SumTable(
    (1 << 14, 1 << 18, 1 << 21),
    (SumWay.ONE_STEP, SumWay.ONE_STEP, SumWay.TRANSPORT),
    (SumWay.ONE_STEP, SumWay.TWO_STEPS, SumWay.TWO_STEPS),
)


def test_the_next_larger_measured_size_counts() -> None:
    sizes = (1, 1 << 14, (1 << 14) + 1, 1 << 18, (1 << 18) + 1, 1 << 21, (1 << 21) + 1)
    alone = [TABLE.way(size, has_norm=False).name for size in sizes]
    assert alone == ["ONE_STEP"] * 4 + ["TRANSPORT"] * 3
    with_norm = [TABLE.way(size, has_norm=True).name for size in sizes]
    assert with_norm == ["ONE_STEP"] * 2 + ["TWO_STEPS"] * 4 + ["TRANSPORT"]
    assert same_way(SumWay.TWO_STEPS, 5).way(5, has_norm=False) is SumWay.TWO_STEPS
    assert same_way(SumWay.TWO_STEPS, 5).way(6, has_norm=True) is SumWay.TRANSPORT


def test_a_line_tells_the_ways() -> None:
    assert TABLE.describe() == (
        "sums of ranks: one step to 256 KiB, transport to 2 MiB; with a norm: one step to 16 KiB, two steps to 2 MiB"
    )


def test_the_quickest_way_is_taken_and_the_transport_only_if_it_is_clearly_quicker() -> None:
    times = {
        16: {SumWay.TRANSPORT: 9.0, SumWay.ONE_STEP: 5.0, SumWay.TWO_STEPS: 6.0},
        32: {SumWay.TRANSPORT: 4.95, SumWay.ONE_STEP: 5.0},
        64: {SumWay.TRANSPORT: 4.0, SumWay.ONE_STEP: 5.0},
        128: {SumWay.TRANSPORT: 4.0},
    }
    assert [way.name for way in quickest(times)] == ["ONE_STEP", "ONE_STEP", "TRANSPORT", "TRANSPORT"]


@given(st.lists(st.tuples(st.integers(1, 1 << 30), WAYS, WAYS), unique_by=lambda row: row[0], max_size=12))
def test_ranks_have_the_leaders_table(rows: list[tuple[int, SumWay, SumWay]]) -> None:
    rows = sorted(rows)
    table = SumTable(tuple(row[0] for row in rows), tuple(row[1] for row in rows), tuple(row[2] for row in rows))
    assert decode_table(table.encode()) == table
