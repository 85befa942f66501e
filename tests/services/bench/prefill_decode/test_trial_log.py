"""Goodput trials that several runs have measured piece by piece give one table."""

from pathlib import Path

import pytest

from blockyard.services.bench.prefill_decode.deployments import APART, two_with_step
from blockyard.services.bench.prefill_decode.measures import PDFigures, PDSizes, Trial
from blockyard.services.bench.prefill_decode.rows import rows_of
from blockyard.services.bench.prefill_decode.trial_log import TrialLog
from blockyard.shared.errors import ConfigError

SIZES = PDSizes(num_requests=40, itl_limit_ms=20.0)
TWO = two_with_step(448)
LONG, SHORT = SIZES.goodput_long, SIZES.goodput_short


def test_runs_add_to_a_file_and_a_later_one_prints_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "trials.jsonl"
    TrialLog(file, 40).add(APART.name, LONG, Trial(3.0, 861.0, 7.27))
    assert capsys.readouterr().out == (
        "apart: 40 requests of 8,192 / 256 tokens at 3 a second: p99 TTFT 861 ms, p99 ITL 7.27 ms\n"
    )
    log = TrialLog(file, 40)
    log.add(TWO.name, LONG, Trial(4.0, 900.0, 19.0))
    log.add(APART.name, SHORT, Trial(9.0, 500.0, 8.0))
    figures: dict[str, PDFigures] = {}
    TrialLog(file, 40).add_to(figures, SIZES)
    assert figures[APART.name].trials_long == [Trial(3.0, 861.0, 7.27)]
    assert figures[APART.name].trials_short == [Trial(9.0, 500.0, 8.0)]
    (row,) = rows_of(figures, SIZES)
    assert "ITL at most 20 ms" in row.what and row.value == 0.75
    assert row.source == "3 / 4 requests a second (two, 448 tokens a step)"


def test_a_rate_that_was_measured_again_counts_once_and_other_sizes_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "trials.jsonl"
    for num_requests, ttft_ms in ((40, 1200.0), (160, 700.0), (40, 800.0)):
        TrialLog(file, num_requests).add(APART.name, LONG, Trial(3.0, ttft_ms, 7.0))
    TrialLog(file, 40).add(APART.name, (100, 10), Trial(3.0, 1.0, 1.0))
    TrialLog(file, 40).add(APART.name, LONG, Trial(2.0, 600.0, 7.0))
    figures = {APART.name: PDFigures(ttft=200.0)}
    TrialLog(file, 40).add_to(figures, SIZES)
    assert figures[APART.name].trials_long == [Trial(2.0, 600.0, 7.0), Trial(3.0, 800.0, 7.0)]
    assert figures[APART.name].ttft == 200.0


def test_without_a_file_the_trials_of_this_run_count() -> None:
    log, figures = TrialLog(None, 40), dict[str, PDFigures]()
    log.add_to(figures, SIZES)
    assert figures == {}
    log.add(APART.name, LONG, Trial(1.0, 300.0, 7.0))
    log.add_to(figures, SIZES)
    assert figures[APART.name].trials_long == [Trial(1.0, 300.0, 7.0)]


def test_a_file_that_is_none(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("not a trial\n")
    with pytest.raises(ConfigError, match=r"--trials .*notes\.txt"):
        TrialLog(file, 40)
    with pytest.raises(ConfigError, match="--trials"):
        TrialLog(tmp_path / "missing" / "file", 40).add(APART.name, LONG, Trial(1.0, 300.0, 7.0))
