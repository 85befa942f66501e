"""Which servers an item needs, and which rows follow from their figures."""

import pytest

from blockyard.services.bench.prefill_decode.deployments import APART, ONE, TWO, PDItem, needed, read_items
from blockyard.services.bench.prefill_decode.measures import PDFigures, PDSizes, Trial, goodput
from blockyard.services.bench.prefill_decode.rows import PDRow, rows_of
from blockyard.shared.errors import ConfigError

SIZES = PDSizes()


def row(rows: list[PDRow], *words: str) -> PDRow:
    (found,) = [row for row in rows if all(word in row.what for word in words)]
    return found


def test_items_name_their_servers() -> None:
    assert read_items([]) == frozenset(PDItem)
    assert [one.name for one in needed(read_items(["one-token"]), [112])] == ["one", "apart"]
    assert [one.name for one in needed(read_items(["itl"]), [112])] == ["apart", "two"]
    assert [one.name for one in needed(read_items(["goodput-short"]), [112, 160])] == [
        "apart",
        "two, 112 tokens a step",
        "two, 160 tokens a step",
    ]


def test_only_the_named_servers_are_started() -> None:
    items = read_items(["goodput-long"])
    assert [one.name for one in needed(items, [112, 448], ["two-448"])] == ["two, 448 tokens a step"]
    assert [one.key for one in needed(items, [112, 448], ["apart", "two-112", "one"])] == ["apart", "two-112"]
    assert [one.flags[-1] for one in needed(items, [112], ["two-96"])] == ["96"]
    assert needed(items, [112], []) == []
    for unknown in ("two-0", "three", "two-"):
        with pytest.raises(ConfigError, match=rf"{unknown}: no such server; the servers are one, apart, .*two-112 and"):
            needed(items, [112], [unknown])


def test_one_limit_of_the_itl_gives_one_row() -> None:
    figures = {
        APART.name: PDFigures(trials_long=[Trial(1.0, 300, 7)], trials_short=[Trial(4.0, 300, 11)]),
        "two, 448 tokens a step": PDFigures(trials_long=[Trial(2.0, 500, 18)], trials_short=[Trial(2.0, 500, 11.5)]),
    }
    long, short = rows_of(figures, PDSizes(itl_limit_ms=20.0))
    assert long.value == 0.5 and "ITL at most 20 ms" in long.what and long.bar is None
    assert short.value == 2.0 and "2,048 in" in short.what and "ITL at most 20 ms" in short.what
    assert rows_of(figures, PDSizes(itl_limit_ms=8.0))[0].unit == "requests/s"


def test_checksums_need_the_prompt_alone_on_the_server_with_checksums() -> None:
    assert read_items(["checksums"]) == {PDItem.CHECKSUMS, PDItem.TTFT}


def test_an_unknown_item_is_named() -> None:
    with pytest.raises(ConfigError, match="latency: no such item; the items are ttft, "):
        read_items(["ttft", "latency"])


def test_ratios_and_their_bars() -> None:
    rows = rows_of(
        {
            ONE.name: PDFigures(ttft=200.0, one_token=200.0),
            APART.name: PDFigures(ttft=205.0, second=7.0, itl=4.0, one_token=201.0, stream_itl=6.0, disturbed_itl=6.6),
            "apart, no checksums": PDFigures(second=6.8, itl=4.0),
            TWO.name: PDFigures(disturbed_itl=13.2),
        },
        SIZES,
    )
    assert row(rows, "TTFT").value == pytest.approx(1.025) and not row(rows, "TTFT").is_met
    assert row(rows, "second token").value == pytest.approx(3.0) and row(rows, "second token").is_met
    assert row(rows, "checksums").value == pytest.approx(0.2)
    assert row(rows, "nothing to send").value == pytest.approx(1.005)
    assert row(rows, "without prompts").value == pytest.approx(1.1)
    assert row(rows, "two unified").value == pytest.approx(0.5) and not row(rows, "two unified").is_met
    assert str(row(rows, "checksums")) == "| checksums, of it | 0.200 ms | 0.5 | 3.00 - 2.80 ms |"


def test_rows_without_all_their_figures_are_left_out() -> None:
    assert rows_of({}, SIZES) == []
    rows = rows_of({APART.name: PDFigures(ttft=205.0, second=7.0, itl=4.0)}, SIZES)
    assert [row.unit for row in rows] == ["ms"]


def test_goodput_is_the_highest_rate_within_both_limits() -> None:
    found = [Trial(1.0, 300, 7), Trial(2.0, 900, 9), Trial(3.0, 1001, 7)]
    assert goodput(found, 1000, 8) == 1.0
    assert goodput(found, 1000, 10) == 2.0
    assert goodput(found, 1000, 5) == 0.0


def test_goodput_is_compared_with_the_best_step_size() -> None:
    figures = {
        APART.name: PDFigures(trials_long=[Trial(1.0, 300, 7), Trial(2.0, 900, 7.5)]),
        "two, 112 tokens a step": PDFigures(trials_long=[Trial(1.0, 900, 7.9)]),
        "two, 448 tokens a step": PDFigures(trials_long=[Trial(1.0, 300, 15), Trial(2.0, 500, 18)]),
    }
    rows = rows_of(figures, SIZES)
    at_8, at_10, at_20 = (row(rows, f"at most {limit} ms") for limit in (8, 10, 20))
    assert at_8.value == 2.0 and at_8.is_met and "112" in at_8.source
    assert at_10.value == 2.0
    assert at_20.value == 1.0 and at_20.bar is None and "448" in at_20.source


def test_goodput_without_a_unified_rate_is_reported_as_it_is() -> None:
    figures = {
        APART.name: PDFigures(trials_short=[Trial(1.0, 300, 7)]),
        "two, 448 tokens a step": PDFigures(trials_short=[Trial(1.0, 300, 15)]),
    }
    (only,) = rows_of(figures, SIZES)
    assert only.value == 1.0 and only.unit == "requests/s" and "no unified step size" in only.what
