"""The simulator: time follows its cost model, and its report matches the simulated run."""

import xml.etree.ElementTree as ET
from pathlib import Path

import msgspec
import pytest

from blockyard.services.scheduler.simulator import report
from blockyard.services.scheduler.simulator.simulation import Simulation, StuckError
from blockyard.services.scheduler.simulator.trace import frames, read_trace
from blockyard.services.scheduler.simulator.worker import Pace
from blockyard.shared import charts
from blockyard.shared.block_hashes import split_hashes
from blockyard.shared.config.services.simulation import CostModel
from blockyard.shared.errors import ConfigError

from .simulations import ROUND, ask, config, simulate


def test_a_request_takes_its_prefill_and_a_step_for_each_token() -> None:
    simulation = simulate(config(), ask(1.0, 40, 3))
    (flow,) = simulation.record.flows
    assert flow.ttft_s == pytest.approx(0.01 + 39 * 0.001)
    assert simulation.record.gaps[""].gap_s.tolist() == pytest.approx([0.01, 0.01])
    assert flow.ended_s == simulation.now == pytest.approx(1.0 + 0.049 + 0.02)
    (worker,) = simulation.workers.values()
    assert (worker.num_steps, worker.busy_s) == (3, pytest.approx(0.069))


def test_blocks_in_host_memory_are_fetched_and_not_computed() -> None:
    """The third prompt equals the first, and the blocks of the first were evicted for the second."""
    cost = msgspec.structs.replace(ROUND, fetch_token_s=0.0001)
    settings = {"max_num_batched_tokens": 256}
    asked = [
        ask(at, 161, 2, prefix_group=group, prefix_tokens=160) for at, group in ((0.0, "a"), (1.0, "b"), (2.0, "a"))
    ]
    computed = simulate(config(cost, {"num_blocks": 11}, **settings), *asked).record.flows[2]
    fetched = simulate(config(cost, {"num_blocks": 11, "num_host_blocks": 20}, **settings), *asked).record.flows[2]
    assert (computed.num_cached_tokens, fetched.num_cached_tokens) == (0, 160)
    assert computed.ttft_s == pytest.approx(0.01 + 160 * 0.001)
    assert fetched.ttft_s == pytest.approx(0.01 + 160 * 0.0001)


def test_running_ahead_hides_the_latency_between_scheduler_and_worker() -> None:
    slow = msgspec.structs.replace(ROUND, hop_s=0.002)
    lockstep = simulate(config(slow, depth=0), ask(0.0, 1, 20)).record.gaps[""].gap_s
    ahead = simulate(config(slow, depth=1), ask(0.0, 1, 20)).record.gaps[""].gap_s
    assert lockstep.tolist() == pytest.approx([0.014] * 19)
    assert ahead.tolist() == pytest.approx([0.01] * 19)


def test_a_step_costs_rows_context_and_pairs() -> None:
    pace = Pace(CostModel(rows_s=((1, 1.0), (3, 2.0)), row_s=10.0, context_token_s=100.0, pair_s=1000.0))
    assert [pace.step_s(rows, 0, 0) for rows in (0, 1, 2, 3, 5)] == [1.0, 1.0, 1.5, 2.0, 22.0]
    assert pace.step_s(1, 2, 3) == 3201.0
    eight = CostModel()
    assert Pace(eight).step_s(64, 64 * 230, 0) == pytest.approx(5.64e-3, rel=0.01)
    assert Pace(eight).step_s(256, 256 * 230, 0) == pytest.approx(10.41e-3, rel=0.01)
    assert Pace(eight).step_s(2048, 0, 2048 * 1024) / 2048 == pytest.approx(24e-6, rel=0.02)


def test_only_shared_prefixes_are_cache_hits() -> None:
    shared = [ask(i, 48, 4, prefix_group="a", prefix_tokens=32) for i in range(3)]
    other = ask(3.0, 48, 4, prefix_group="b", prefix_tokens=32)
    alone = [ask(4.0, 48, 4), ask(5.0, 48, 4)]
    found = [flow.num_cached_tokens for flow in simulate(config(), *shared, other, *alone).record.flows]
    assert found == [0, 32, 32, 0, 0, 0]
    off = simulate(config(enable_prefix_caching=False), *shared)
    assert [flow.num_cached_tokens for flow in off.record.flows] == [0, 0, 0]


def test_choices_stops_and_limits() -> None:
    simulation = simulate(
        config(more={"max_model_len": 50}), ask(0, 10, 5, n=3), ask(0, 10, 5, max_tokens=30), ask(0, 40, 99)
    )
    assert [flow.num_open for flow in simulation.record.flows] == [0, 0, 0]
    assert simulation.record.num_output_tokens == 3 * 5 + 5 + 10


def test_the_queue_refuses_what_it_cannot_hold() -> None:
    simulation = simulate(config(max_queue_len=2, max_num_seqs=1), *(ask(0.0, 8, 8) for _ in range(5)))
    refused = [flow.refused for flow in simulation.record.flows]
    assert sorted(refused)[-1] == 429 and 1 <= refused.count(429) <= 3
    summary = report.summarize(simulation, 1.0)
    assert summary.refused == refused.count(429) and summary.completed == 5 - summary.refused


def test_blocks_are_full_when_the_first_preemption_comes() -> None:
    requests = [ask(0.001 * i, 20 + i % 30, 60 + i % 50) for i in range(200)]
    simulation = simulate(config(max_num_seqs=64, more={"num_blocks": 128}), *requests)
    first = simulation.record.first_preemption
    assert first is not None and simulation.core.stats().preemptions_total > 0
    assert 0.96 <= first.used <= 1.0
    assert 0 <= first.unfilled <= 0.04
    assert f"the first at {first.at_s:.1f} s" in report.table(config(), simulation, report.summarize(simulation, 1.0))


def test_unfilled_block_slots_are_counted() -> None:
    """17 tokens are computed: 15 slots of the second block stay empty, from its first token on."""
    simulation = simulate(config(), ask(0.0, 17, 1))
    assert simulation.record.samples[0].unfilled in (0.0, 15 / 32)
    whole = simulate(config(), ask(0.0, 31, 200), ask(0.0, 17, 200))
    assert all(sample.unfilled < 0.05 for sample in whole.record.samples)


def test_throughput_grows_with_workers() -> None:
    requests = [ask(0.0, 10, 50) for _ in range(16)]
    one = simulate(config(max_num_seqs=4), *requests)
    four = simulate(config(max_num_seqs=4, more={"num_workers": 4}), *requests)
    assert four.now < 0.35 * one.now
    assert [worker.num_steps > 0 for worker in four.workers.values()] == [True] * 4


def test_a_simulation_is_the_same_each_time() -> None:
    requests = [ask(0.01 * i, 5 + i % 7, 3 + i % 11, tenant="ab"[i % 2]) for i in range(50)]
    once, again = (simulate(config(more={"num_workers": 3}), *requests) for _ in range(2))
    assert [flow.ended_s for flow in once.record.flows] == [flow.ended_s for flow in again.record.flows]


def test_a_scheduler_that_never_answers_is_not_waited_for() -> None:
    simulation = Simulation(config(more={"num_workers": 1}), [ask(0.0, 8, 8)])
    simulation.workers.clear()
    with pytest.raises(StuckError, match="1 requests are open"):
        simulation.run()


def test_the_report_has_every_chart_and_tenant() -> None:
    requests = [ask(0.05 * i, 10, 8, tenant="light" if i % 5 else "heavy") for i in range(40)]
    simulation = simulate(config(more={"num_workers": 2}), *requests)
    text = report.table(config(more={"num_workers": 2}), simulation, report.summarize(simulation, 2.0))
    rows = [line.split("  ")[0] for line in text.splitlines()]
    assert {"TTFT", "ITL", "TTFT of light", "ITL of heavy"} <= set(rows)
    assert "40 requests completed, in " in text and "400 in" in text and "320 out" in text
    drawn = report.charts(simulation)
    assert len(drawn) == 10
    page = ET.fromstring(charts.page("t", text, drawn).removeprefix("<!DOCTYPE html>"))
    titles = [svg[0].text for svg in page.iter("{http://www.w3.org/2000/svg}svg")]
    assert titles[:4] == ["Queue", "Batch", "KV blocks", "Throughput"]
    single = simulate(config(), ask(0.0, 1, 1))
    assert "TTFT of" not in report.table(config(), single, report.summarize(single, 1.0))
    assert len(report.charts(single)) >= 4


def test_frames_name_tenants_and_priorities() -> None:
    (frame,) = frames([ask(0.0, 4, 2, tenant="t", priority=-3, n=2, max_tokens=9)], "m", 16)
    assert (frame.tenant, frame.priority, len(frame.choices), frame.sampling.max_tokens) == ("t", -3, 2, 9)
    assert len(frame.prompt_ids) == 16


def test_simulated_prompts_share_the_hashes_of_the_blocks_that_they_share() -> None:
    asked = [
        ask(0.0, 100, 1, prefix_group="a", prefix_tokens=50),
        ask(0.0, 80, 1, prefix_group="a"),
        ask(0.0, 80, 1, prefix_group="b"),
        ask(0.0, 15, 1),
    ]
    one, two, three, short = (split_hashes(frame.block_hashes) for frame in frames(asked, "m", 16))
    assert [len(one), len(two), len(three), len(short)] == [6, 5, 5, 0]
    assert one[:3] == two[:3], "48 of the 50 tokens fill blocks"
    assert len({*one, *two, *three}) == 6 + 2 + 5


def test_traces_are_checked_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(
        '{"arrival_s":2,"prompt_tokens":1,"output_tokens":1}\n\n{"arrival_s":1,"prompt_tokens":2,"output_tokens":1}'
    )
    assert [request.arrival_s for request in read_trace(path)] == [1, 2]
    for line, message in (
        ('{"arrival_s":1,"prompt_tokens":0,"output_tokens":1}', "line 1: prompt_tokens must be at least 1"),
        ('{"arrival_s":1,"prompt_tokens":1,"output_tokens":2,"max_tokens":1}', "max_tokens 1 is less"),
        ('{"arrival_s":1,"prompt_tokens":1,"output_tokens":1,"prefix_tokens":2}', "prefix_tokens must be 0 to 1"),
        ('{"arrival_s":1,"prompt_tokens":1}', "output_tokens"),
        ('{"arrival_s":1,"prompt_tokens":1,"output_tokens":1,"tenants":"a"}', "unknown field `tenants`"),
        ("", "holds no request"),
    ):
        path.write_text(line)
        with pytest.raises(ConfigError, match=message):
            read_trace(path)
    with pytest.raises(ConfigError, match="No such file"):
        read_trace(tmp_path / "none")


def test_costs_are_checked() -> None:
    with pytest.raises(ValueError, match="rising rows"):
        CostModel(rows_s=((2, 0.1), (1, 0.1)))
    with pytest.raises(ValueError, match="below 0"):
        CostModel(row_s=-1.0)
    with pytest.raises(ValueError, match="num_workers"):
        config(more={"num_workers": 0})
