"""The figures of a server with a mock worker, whose steps take a known time."""

from collections.abc import Iterator

import pytest
from rig import serve as rig_serve

from blockyard.services.bench.load.results import BenchError
from blockyard.services.bench.prefill_decode import measures
from blockyard.services.bench.prefill_decode.deployments import PDItem
from blockyard.services.bench.prefill_decode.measures import PDSizes, measure
from blockyard.services.bench.suite.served import SuiteServer

STEP_MS = 4
SIZES = PDSizes(
    prompt=96, runs=2, streams=3, stream_input=8, stream_output=150, num_prompts=3, prompts_per_s=20.0,
    goodput_long=(64, 4), goodput_short=(16, 6), num_requests=6, rates=(20.0, 40.0),
)  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[SuiteServer]:
    flags = ("--worker-cls", "mock", "--mock-step-ms", str(STEP_MS))
    with rig_serve("demo", *flags) as running:
        yield SuiteServer(running.url, running.launched_s)


def test_all_figures_of_a_unified_worker(server: SuiteServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measures, "LEAD_S", 0.1)
    found = measure(server, list(PDItem), SIZES)
    assert found.ttft is not None and found.ttft >= STEP_MS
    assert found.itl is not None and found.itl >= 0.5 * STEP_MS
    assert found.exposed is not None and found.one_token is not None
    assert found.stream_itl is not None and found.disturbed_itl is not None
    assert [trial.rate for trial in found.trials_long] == [20.0, 40.0]
    assert [trial.rate for trial in found.trials_short] == [20.0, 40.0]


def test_only_the_chosen_items_are_measured(server: SuiteServer) -> None:
    found = measure(server, [PDItem.ONE_TOKEN], SIZES)
    assert found.one_token is not None
    assert found.ttft is None and found.stream_itl is None and found.trials_long == []


def test_streams_that_end_before_the_prompts_arrive_are_an_error(server: SuiteServer) -> None:
    short = PDSizes(streams=1, stream_input=8, stream_output=20, num_prompts=1, prompt=16)
    with pytest.raises(BenchError, match="before the long prompts"):
        measures.stream_itl(server, short, num_prompts=1)


def test_trials_end_at_the_first_rate_over_the_limit(server: SuiteServer) -> None:
    told: list[float] = []
    sizes = PDSizes(num_requests=4, rates=(30.0, 60.0, 90.0), ttft_limit_ms=0.001)
    found = measures.trials(server, sizes, (8, 3), lambda lengths, trial: told.append(trial.rate))
    assert [trial.rate for trial in found] == told == [30.0]


def test_trials_end_at_the_first_rate_over_the_one_limit_of_the_itl(server: SuiteServer) -> None:
    sizes = PDSizes(num_requests=4, rates=(30.0, 60.0), itl_limit_ms=0.001)
    assert [trial.rate for trial in measures.trials(server, sizes, (8, 3), lambda lengths, trial: None)] == [30.0]
