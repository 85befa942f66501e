"""Charts: everything drawn stays within the frame, and files are self-contained."""

import xml.etree.ElementTree as ET

import pytest

from blockyard.shared import charts
from blockyard.shared.charts import Curve

SVG = "{http://www.w3.org/2000/svg}"


def test_a_distribution_is_thinned_out_and_keeps_its_ends() -> None:
    assert charts.cdf([3.0, 1.0]) == [(1.0, 0.5), (3.0, 1.0)]
    many = charts.cdf([float(i) for i in range(100_000)])
    assert len(many) <= charts.MAX_POINTS + 1
    assert (many[0], many[-1]) == ((0.0, 1e-5), (99_999.0, 1.0))


def test_curves_share_their_axes_and_are_named() -> None:
    assert charts.svg("t", "x", "y", Curve([])) == ""
    root = ET.fromstring(charts.svg("a<b", "x", "y", Curve([(0, 0), (10, 5)], "one"), Curve([(5, 10)], "two & more")))
    first, second = root.iter(f"{SVG}polyline")
    assert (first.attrib["class"], second.attrib["class"]) == ("line c0", "line c1")
    points = [tuple(map(float, p.split(","))) for line in (first, second) for p in line.attrib["points"].split()]
    left, right = charts.LEFT, charts.WIDTH - charts.RIGHT
    bottom, top = charts.HEIGHT - charts.BOTTOM, charts.TOP
    assert points == [(left, bottom), (right, (bottom + top) / 2), ((left + right) / 2, top)]
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert texts[0] == "a<b" and {"one", "two & more"} <= set(texts)


@pytest.mark.parametrize(("high", "ticks"), [(1.0, [0, 0.2, 0.4, 0.6, 0.8, 1]), (9.0, [0, 2, 4, 6, 8]), (1e-6, None)])
def test_ticks_are_round(high: float, ticks: list[float] | None) -> None:
    found = charts.Axis(0.0, high, 0.0, 100.0).ticks()
    assert 4 <= len(found) <= 7
    assert ticks is None or found == pytest.approx(ticks)


def test_pages_and_sheets_are_well_formed_and_load_nothing() -> None:
    chart = charts.svg("t", "x", "y", Curve([(1, 1)]))
    for text, num in ((charts.page("a & b", "1 < 2", [chart, chart]), 2), (charts.sheet([chart] * 3), 4)):
        root = ET.fromstring(text.removeprefix("<!DOCTYPE html>"))
        assert len([*root.iter(f"{SVG}svg")]) == num
        assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
