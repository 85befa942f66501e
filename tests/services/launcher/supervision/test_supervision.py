"""Decisions after a child's death, without processes."""

import asyncio
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rings import deployment

from blockyard.services.launcher.supervision.child import HEALTHY_S, MAX_DELAY_S, BackOff, Child, ending, service_specs
from blockyard.services.launcher.supervision.supervisor import Supervisor, stop_order
from blockyard.shared.config.services.scheduler import SchedulerConfig


def test_delays_double_up_to_ten_seconds() -> None:
    back_off = BackOff()
    assert [back_off.delay_s(1.0) for _ in range(8)] == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0]


def test_a_child_that_was_healthy_begins_anew() -> None:
    back_off = BackOff()
    for _ in range(5):
        back_off.delay_s(0.0)
    assert back_off.delay_s(HEALTHY_S) == 0.2
    assert back_off.delay_s(HEALTHY_S - 0.1) == 0.4


@given(st.lists(st.floats(0, 100)))
def test_no_delay_is_out_of_bounds_and_only_health_shortens_it(runs: list[float]) -> None:
    back_off = BackOff()
    before = 0.0
    for ran_s in runs:
        delay = back_off.delay_s(ran_s)
        assert 0.2 <= delay <= MAX_DELAY_S
        assert delay >= before or ran_s >= HEALTHY_S
        before = delay


def test_the_slowest_start_is_first_and_gateways_stop_first(tmp_path: Path) -> None:
    ring = service_specs(deployment(tmp_path, "--api-gateways", "2"))
    assert [spec.service for spec in ring][:2] == ["gpu_worker", "message_bus"]
    waves = stop_order([Child(spec, tmp_path) for spec in ring])
    assert [[child.spec.name for child in wave] for wave in waves] == [
        ["api_gateway 0", "api_gateway 1"],
        ["scheduler"],
        ["gpu_worker", "tokenizer_pool 0", "detokenizer 0"],
        ["message_bus"],
    ]
    assert sum(map(len, waves)) == len(ring)


def test_a_start_in_a_ring_that_was_ready_is_a_restart(tmp_path: Path) -> None:
    specs = [spec for spec in service_specs(deployment(tmp_path)) if spec.service == "scheduler"]
    supervisor = Supervisor(specs, tmp_path, lambda _, settings: ["cp", str(settings), str(tmp_path / "seen")])
    [child] = supervisor.children
    seen = []
    for _ in range(2):
        assert asyncio.run(child.run_once()) == 0
        config = msgspec.json.decode((tmp_path / "seen").read_bytes(), type=SchedulerConfig)
        seen.append(config.process.is_restart)
        supervisor.settle()
    assert seen == [False, True]


@pytest.mark.parametrize(
    ("code", "words"),
    [(1, "exit code 1"), (-9, "killed by SIGKILL"), (-11, "killed by SIGSEGV"), (-99, "killed by signal 99")],
)
def test_endings_in_words(code: int, words: str) -> None:
    assert ending(code) == words
