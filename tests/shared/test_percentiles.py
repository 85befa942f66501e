"""Percentiles and their row."""

import pytest

from blockyard.shared.percentiles import Percentiles, percentile, percentiles_head, percentiles_of, percentiles_row


def test_percentiles_interpolate() -> None:
    ordered = [float(i) for i in range(11)]
    assert [percentile(ordered, p) for p in (0, 50, 90, 95, 100)] == pytest.approx([0, 5, 9, 9.5, 10])
    assert percentile([3.0], 99) == 3.0
    assert percentiles_of([3.0, 1.0], 1000) == Percentiles(2000.0, 2000.0, 2800.0, 2980.0, 3000.0)
    assert percentiles_of([]) is None


def test_rows_stand_under_their_head() -> None:
    head, row = percentiles_head("ms", 14), percentiles_row("TTFT of a", percentiles_of([1.0, 2.0]), 14)
    assert len(head) == len(row) == 14 + 55
    assert row.split()[-5:] == ["1.50", "1.50", "1.90", "1.99", "2.00"]
    assert percentiles_row("TTFT", None).split() == ["TTFT", *"-----"]
