"""Simulated workers of two roles: when blocks land, what the report says, and what happens when workers die."""

import msgspec
import pytest

from blockyard.services.scheduler.simulator import report
from blockyard.services.scheduler.simulator.simulation import Simulation
from blockyard.services.scheduler.simulator.transfers import SimTransfers
from blockyard.shared.config.services.simulation import CostModel, SimulatedKill, SimulatedRole, SimulationConfig
from blockyard.shared.messages import KVAbort, KVLanded, KVReceive, KVRole, KVSend, KVSendEnded

from .simulations import ROUND, ask, config, simulate

P, D = KVRole.PREFILL, KVRole.DECODE
# a block of 16 tokens takes 16 ms on the link, and 1 ms later it has landed
LINKED = msgspec.structs.replace(
    ROUND, token_bytes=1000, link_bytes_s=1e6, link_latency_s=0.001, num_layers=4, stream_layers=True
)
UNSTREAMED = msgspec.structs.replace(LINKED, stream_layers=False)


def apart(num_prefill: int, num_decode: int, cost: CostModel = LINKED, **more: object) -> SimulationConfig:
    roles = [SimulatedRole(role=P, num_workers=num_prefill), SimulatedRole(role=D, num_workers=num_decode)]
    return config(cost, {"roles": roles} | more, decode_prefill_tokens=0)


def steps(simulation: Simulation, role: KVRole) -> int:
    return sum(worker.num_steps for worker in simulation.all_workers if worker.geometry.kv_role is role)


def test_a_prompt_is_computed_by_one_role_and_continued_by_the_other() -> None:
    simulation = simulate(apart(1, 1), ask(0.0, 32, 5))
    assert (steps(simulation, P), steps(simulation, D)) == (1, 4)
    (flow,) = simulation.record.flows
    assert flow.ttft_s == pytest.approx(0.041), "no transfer is in it"
    stats = simulation.core.stats()
    assert (stats.transfers_landed_total, stats.transfers_aborted_total, stats.transfers_open) == (1, 0, 0)
    assert simulation.transfers.num_bytes == 32_000


@pytest.mark.parametrize(
    ("cost", "exposed_s"),
    [
        # the step takes 41 ms; of a copy of 32 ms, the last layer's 8 ms come after it
        (LINKED, 0.008 + 0.001),
        # a copy of 64 ms begins after the first layer, and ends after the step
        (msgspec.structs.replace(LINKED, link_bytes_s=0.5e6), 0.041 / 4 + 0.064 - 0.041 + 0.001),
        (UNSTREAMED, 0.032 + 0.001),
    ],
)
def test_streaming_by_layers_exposes_little_of_a_transfer(cost: CostModel, exposed_s: float) -> None:
    simulation = simulate(apart(1, 1, cost), ask(0.0, 32, 3))
    (flow,) = simulation.record.flows
    decode_s = 0.01  # the step of the second token
    assert flow.second_gap_s == pytest.approx(exposed_s + decode_s)
    assert simulation.record.gaps[""].gap_s[1] == pytest.approx(0.01)


def test_transfers_share_the_links_of_both_workers() -> None:
    """Two senders and one receiver: the second transfer waits for the first."""
    alone = simulate(apart(2, 1, UNSTREAMED), ask(0.0, 32, 2)).record.flows[0]
    both = simulate(apart(2, 1, UNSTREAMED), ask(0.0, 32, 2), ask(0.0, 32, 2)).record.flows
    waits = sorted(flow.second_gap_s - alone.second_gap_s for flow in both)
    assert waits == pytest.approx([0.0, 0.032], abs=0.011), "to the step that is under way"
    assert waits[1] > 0.02


class Line:
    """What two workers tell the scheduler, and what is to happen later."""

    def __init__(self, cost: CostModel = LINKED) -> None:
        self.told: list[tuple[float, KVLanded | KVSendEnded]] = []
        self.later: list[tuple[float, object]] = []
        self.transfers = SimTransfers(
            cost,
            16,
            lambda when, call: self.later.append((when, call)),
            lambda t, _, frame: self.told.append((t, frame)),
        )
        self.transfers.receive(2, KVReceive(7, 1, 0, [5, 6]))

    def send(self, block: int, is_last: bool, began: float) -> None:
        self.transfers.send([KVSend(7, 2, 0, b"", [block - 5], [block], is_last)], began, began + 0.01)

    def run(self, until: float = 100.0) -> None:
        while self.later and min(self.later, key=lambda one: one[0])[0] <= until:
            when, call = self.later.pop(self.later.index(min(self.later, key=lambda one: one[0])))
            call(when)


def test_a_transfer_has_ended_when_its_last_part_has_landed() -> None:
    line = Line()
    line.send(5, False, 0.0)
    line.run()
    assert not line.told
    line.send(6, True, 1.0)
    line.run()
    when = pytest.approx(1.0 + 0.0025 + 0.016 + 0.001)
    assert line.told == [(when, KVLanded(7, [5, 6], is_ended=True)), (when, KVSendEnded(7, True))]


@pytest.mark.parametrize("asked", [1, 2])
def test_an_abort_ends_both_sides_and_is_always_answered(asked: int) -> None:
    line = Line()
    line.send(5, False, 0.0)
    line.run()
    line.send(6, True, 1.0)
    line.run(until=1.01)  # it is on the link
    line.transfers.abort(asked, KVAbort(7, is_source=asked == 1), 1.011)
    ended = [KVLanded(7, [5], is_ended=True), KVSendEnded(7, False)]
    assert [frame for _, frame in line.told] == ended
    line.run()
    assert len(line.told) == 2, "what was on the link lands nowhere"
    line.transfers.abort(2, KVAbort(7), 2.0)
    line.transfers.abort(1, KVAbort(7, is_source=True), 2.0)
    assert [frame for _, frame in line.told[2:]] == [KVLanded(7, [], is_ended=True), KVSendEnded(7, False)]


def test_an_abort_before_the_first_part_is_answered_by_both() -> None:
    line = Line()
    line.transfers.abort(1, KVAbort(7, is_source=True), 0.0)
    assert {type(frame) for _, frame in line.told} == {KVLanded, KVSendEnded}
    line.send(5, True, 1.0)
    line.run()
    assert len(line.told) == 2


@pytest.mark.parametrize("dead", [1, 2])
def test_the_survivor_of_a_transfer_says_that_it_has_ended(dead: int) -> None:
    line = Line()
    line.send(5, False, 0.0)
    line.run()
    line.transfers.on_lost(dead, 1.0)
    survivor = {1: KVLanded(7, [5], is_ended=True), 2: KVSendEnded(7, False)}[dead]
    assert survivor in [frame for _, frame in line.told]


@pytest.mark.parametrize("streamed", [True, False])
def test_every_request_ends_once_whatever_dies(streamed: bool) -> None:
    requests = [ask(0.02 * i, 20 + i % 60, 3 + i % 20) for i in range(120)]
    kills = [
        SimulatedKill(role, at_s) for i, at_s in enumerate((0.3, 0.6, 0.61, 1.1, 1.5, 1.9)) for role in [(P, D)[i % 2]]
    ]
    settings = apart(2, 2, LINKED if streamed else UNSTREAMED, kills=kills, restart_s=0.2)
    simulation = simulate(settings, *requests)
    assert len(simulation.lost_workers) == len(kills)
    for flow in simulation.record.flows:
        assert (flow.num_open, flow.detail, flow.refused) == (0, "", 0)
    assert simulation.record.num_output_tokens == sum(request.output_tokens for request in requests)
    stats = simulation.core.stats()
    assert stats.transfers_aborted_total > 0 and stats.transfers_landed_total > 60
    assert "given up" in report.table(settings, simulation, report.summarize(simulation, 1.0))


@pytest.mark.parametrize("role", [P, D])
def test_without_a_live_worker_of_a_role_the_other_serves(role: KVRole) -> None:
    settings = apart(1, 1, kills=[SimulatedKill(role, 0.05)], restart_s=1000.0)
    simulation = simulate(settings, *(ask(0.02 * i, 40, 8) for i in range(20)))
    assert simulation.now < 100 and simulation.record.num_output_tokens == 160


def test_the_report_has_the_use_of_both_roles() -> None:
    settings = apart(2, 1)
    simulation = simulate(settings, *(ask(0.04 * i, 40, 10) for i in range(40)))
    summary = report.summarize(simulation, 1.0)
    text = report.table(settings, simulation, summary)
    assert "2 prefill workers, each 100 KV blocks" in text and "1 decode worker, each 100 KV blocks" in text
    assert "40 transfers landed" in text and "first to second token" in text
    assert 0 < summary.roles[P] < summary.roles[D] <= 1
    busy_s = {role: sum(w.busy_s for w in simulation.all_workers if w.geometry.kv_role is role) for role in (P, D)}
    assert summary.roles == pytest.approx({P: busy_s[P] / simulation.now / 2, D: busy_s[D] / simulation.now})
    chart = report.charts(simulation)[1]
    assert ">Workers busy<" in chart and ">prefill<" in chart and ">decode<" in chart
    assert chart.count("<polyline") == 2


def test_a_worker_that_died_has_computed_until_then() -> None:
    settings = apart(1, 1, kills=[SimulatedKill(D, 0.5)], restart_s=0.1)
    simulation = simulate(settings, *(ask(0.0, 40, 60) for _ in range(8)))
    (lost,) = simulation.lost_workers
    assert 0.3 < lost.busy_s <= 0.5
