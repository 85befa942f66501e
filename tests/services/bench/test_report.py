"""Reports: table, warnings, JSON, plots."""

import io
import xml.etree.ElementTree as ET
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from blockyard.services.bench import metrics, report
from blockyard.services.bench.load.client import LoadRun
from blockyard.services.bench.load.monitor import LoadProgressBar, cpu_share
from blockyard.services.bench.load.results import RequestResult
from blockyard.shared import charts
from blockyard.shared.errors import ConfigError

SVG = "{http://www.w3.org/2000/svg}"


def results(num: int = 40) -> list[RequestResult]:
    made = [RequestResult(i * 0.1, i * 0.1 + 0.5, 0.0, [i * 0.1 + 0.2, i * 0.1 + 0.5], 2, 7, 2) for i in range(num)]
    return [*made, RequestResult(0.0, 0.1, asked_output=2, failure="HTTP 429: <full>")]


def reported(found: list[RequestResult], cpu_share: float = 0.1) -> report.ServeReport:
    return report.ServeReport(
        version="1",
        date="today",
        url="http://x",
        model="a<b",
        settings={"num_prompts": len(found)},
        summary=metrics.summarize(found, 4.4, {"ttft": 500}),
        client=report.ClientLoad(cpu_share, cpu_share, None),
        failures=metrics.failures(found),
        requests=report.request_rows(found, 0.0),
    )


def test_the_table_has_all_figures() -> None:
    text = report.text(reported(results()))
    assert "40 requests completed, 1 failed, in 4.40 s" in text
    assert "goodput   9.09 requests/s within the limits, 97.6% of all" in text
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line}
    assert rows["TTFT"] == ["200.00"] * 5
    assert rows["ITL"] == rows["TPOT"] == ["300.00"] * 5
    assert rows["E2EL"] == ["500.00"] * 5
    assert "warning: 1 failed: HTTP 429: <full>" in text
    assert "-" in report.text(reported([results()[-1]])).splitlines()[-5], "nothing completed, nothing measured"


def test_warnings_name_reasons_to_doubt_the_figures() -> None:
    assert report.warnings(reported(results()[:-1])) == []
    assert "may be the limit that was measured" in report.warnings(reported(results()[:-1], cpu_share=0.81))[0]
    short = RequestResult(0.0, 1.0, 0.0, [1.0], asked_output=9, num_input=1, num_output=5)
    uncounted = RequestResult(0.0, 1.0, 0.0, [1.0], asked_output=1)
    found = " / ".join(report.warnings(reported([short, uncounted])))
    assert "1 requests did not have the requested length" in found
    assert "no usage for 1 requests" in found
    assert "3.00 tokens an event" in found


def test_json_has_all_results(tmp_path: Path) -> None:
    made = reported(results())
    path = tmp_path / "out.json"
    report.write(path, report.as_json(made))
    assert msgspec.json.decode(path.read_bytes(), type=report.ServeReport | report.OfflineReport) == made
    assert made.requests[3].sent_s == pytest.approx(0.3) and made.requests[3].max_gap_ms == pytest.approx(300)
    assert (made.requests[-1].ttft_ms, made.requests[-1].failure) == (None, "HTTP 429: <full>")
    with pytest.raises(ConfigError, match="No such file"):
        report.write(tmp_path / "no" / "out.json", b"")


def test_the_page_is_one_well_formed_file_with_three_plots() -> None:
    found = results()
    page = report.page(reported(found), found, 0.0)
    root = ET.fromstring(page.removeprefix("<!DOCTYPE html>"))
    titles = [next(svg.iter(f"{SVG}text")).text for svg in root.iter(f"{SVG}svg")]
    assert titles == ["Time to first token", "Inter-token latency", "Running requests"]
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "").replace("http://x", ""), "nothing to load"
    for line in root.iter(f"{SVG}polyline"):
        for point in line.attrib["points"].split():
            x, y = map(float, point.split(","))
            assert 0 <= x <= charts.WIDTH and 0 <= y <= charts.HEIGHT
    failed = report.page(reported(found[-1:]), found[-1:], 0.0)
    assert failed.count("<svg") == 1, "only the running requests can be drawn"


def test_the_timeline_has_a_step_for_each_change() -> None:
    steps = report.timeline([RequestResult(1.0, 3.0), RequestResult(2.0, 3.0)], 1.0)
    rise, fall = [(0.0, 0.0), (0.0, 0.0), (0.0, 1.0), (1.0, 1.0), (1.0, 2.0)], [(2.0, 2.0), (2.0, 1.0), (2.0, 1.0)]
    assert steps == [*rise, *fall, (2.0, 0.0)]
    assert report.timeline([], 0.0) == []


def test_the_progress_bar_counts() -> None:
    out = io.StringIO()
    bar = LoadProgressBar(9, Console(file=out, force_terminal=True, width=100))
    bar.show(LoadRun(num_ended=4, num_running=3, num_refused=2))
    bar.close()
    assert "4/9" in out.getvalue() and "3 running" in out.getvalue() and "2 failed" in out.getvalue()


def test_cpu_shares() -> None:
    assert cpu_share((1.0, 5.0), (3.0, 6.0)) == 0.5
