"""The search for the most requests a second within limits, and for the best roles of so many workers."""

import gc
from pathlib import Path

import msgspec
import pytest

from blockyard.services.scheduler.simulator import __main__ as command
from blockyard.services.scheduler.simulator import goodput
from blockyard.services.scheduler.simulator.goodput import GoodputSearch, LimitWatch, Setup, Trial
from blockyard.services.scheduler.simulator.simulation import Simulation
from blockyard.shared.config.services.simulation import LatencyLimits, SimulatedRole
from blockyard.shared.errors import ConfigError
from blockyard.shared.messages import KVRole

from .simulations import ask, config, simulate

LIMITS = LatencyLimits(ttft_ms=100, itl_ms=20)
REQUESTS = [ask(0.1 * (i + 1), 10, 10) for i in range(40)]  # 10 a second
ONE = Setup("one", [SimulatedRole()])


def serving(monkeypatch: pytest.MonkeyPatch, most: dict[str, float], rates: list[float] | None = None) -> GoodputSearch:
    """A search in which each setup serves so many requests a second, by name. `rates` gets each that is tried."""
    search = GoodputSearch(config(), REQUESTS, LIMITS)

    def trial(setup: Setup, rate: float) -> Trial:
        if rates is not None:
            rates.append(rate)
        return Trial(50.0, 10.0) if rate <= most[setup.name] else Trial()

    monkeypatch.setattr(search, "trial", trial)
    return search


@pytest.mark.parametrize("most", [0.1, 3.0, 10.0, 11.0, 500.0])
def test_goodput_is_the_highest_rate_within_the_limits(monkeypatch: pytest.MonkeyPatch, most: float) -> None:
    search = serving(monkeypatch, {"one": most})
    found = search.goodput(ONE)
    assert not found.is_less and most / 1.021 < found.per_s <= most
    assert search.goodput(ONE, more_than=most).is_less
    assert search.goodput(ONE, more_than=most / 2).per_s > most / 1.021


def test_a_setup_that_serves_no_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    search = serving(monkeypatch, {"one": 0.0, "two": 0.0})
    found = search.best([ONE, Setup("two", [])], 0)
    assert found.is_less
    assert goodput.conclusion(found, found) == "no setup serves any rate within the limits"


@pytest.mark.parametrize("peak", [0, 3, 20, 38])
def test_few_setups_are_tried(monkeypatch: pytest.MonkeyPatch, peak: int) -> None:
    setups = [Setup(str(i), []) for i in range(39)]
    rates: list[float] = []
    search = serving(monkeypatch, {str(i): 100.0 / (1 + abs(i - peak)) for i in range(39)}, rates)
    assert search.best(setups, 19).setup.name == str(peak)
    assert len(search.found) < 20 and len(rates) < 120


def test_a_simulation_is_ended_when_a_limit_is_missed_for_certain() -> None:
    for requests, limits in (
        ([ask(0.0, 40, 20) for _ in range(60)], LIMITS),
        (REQUESTS, LatencyLimits(ttft_ms=1000, itl_ms=5)),
    ):
        whole, ended = simulate(config(), *requests), Simulation(config(), requests)
        assert not ended.run(LimitWatch(ended, limits).is_hopeless)
        assert ended.now < whole.now
    fine = Simulation(config(), REQUESTS)
    assert fine.run(LimitWatch(fine, LatencyLimits(ttft_ms=100, itl_ms=30)).is_hopeless)


def test_a_trial_plays_the_trace_at_a_rate() -> None:
    search = GoodputSearch(config(), REQUESTS, LIMITS)
    assert [one.arrival_s for one in search.at_rate(20.0)] == pytest.approx([0.05 * (i + 1) for i in range(40)])
    assert search.trial(ONE, 1.0) == Trial(pytest.approx(19.0), pytest.approx(10.0)), "each is alone"
    found = search.goodput(ONE, more_than=5.0)
    assert search.trial(ONE, found.per_s).is_within(LIMITS)
    assert not search.trial(ONE, 1.5 * found.per_s).is_within(LIMITS)
    with pytest.raises(ConfigError, match="must not all arrive at 0"):
        GoodputSearch(config(), [ask(0.0, 1, 1)], LIMITS).goodput(ONE)


def test_splits_keep_the_settings_of_each_role() -> None:
    roles = [
        SimulatedRole(role=KVRole.PREFILL, num_workers=1, max_num_batched_tokens=4096),
        SimulatedRole(role=KVRole.DECODE, num_workers=4, num_blocks=77),
    ]
    setups, first = goodput.splits(config(more={"roles": roles}))
    assert [setup.name for setup in setups] == [f"{i} prefill + {5 - i} decode" for i in range(1, 5)]
    assert setups[first].roles == roles
    assert [(each.max_num_batched_tokens, each.num_blocks) for each in setups[3].roles] == [(4096, None), (None, 77)]
    made = goodput.setup_config(config(more={"roles": roles}), setups[3])
    assert (made.scheduler.max_num_batched_tokens, made.roles) == (4096, setups[3].roles)
    assert goodput.splits(config(more={"num_workers": 8}))[1] == 3, "in the middle"
    with pytest.raises(ConfigError, match="at least 2 in all"):
        goodput.splits(config())


def test_unified_workers_have_each_step_size() -> None:
    setups, first = goodput.unified(config(more={"num_workers": 3}, max_num_seqs=100, max_num_batched_tokens=100))
    sizes = [setup.roles[0].max_num_batched_tokens for setup in setups]
    assert sizes == list(goodput.STEP_SIZES) and sizes[first] == 256
    assert {setup.roles[0].num_workers for setup in setups} == {3}
    assert [setup.roles[0].max_num_seqs for setup in setups[:3]] == [64, 96, 100], "a step holds all running sequences"


def test_the_command_says_which_split_is_best(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gc, "disable", lambda: None)
    trace = tmp_path / "t.jsonl"
    trace.write_bytes(msgspec.json.Encoder().encode_lines([ask(0.2 * (i + 1), 40, 12) for i in range(12)]))
    more = {"num_workers": 3, "goodput": LIMITS, "trace": str(trace), "html": str(tmp_path / "t.html")}
    settings = msgspec.structs.replace(config(), **more)
    command.simulate(settings)
    lines = capsys.readouterr().out.splitlines()
    (best,) = [line for line in lines if line.startswith("best: ")]
    tried = {line.split("  ")[0]: line for line in lines if " prefill + " in line or " unified, " in line}
    assert {"1 prefill + 2 decode", "2 prefill + 1 decode"} <= tried.keys()
    assert best.removeprefix("best: ").split(", ")[0] in [name.split(", ")[0] for name in tried]
    assert "12 requests completed" in "\n".join(lines)
    assert best in (tmp_path / "t.html").read_text()
