"""The real scheduler and mock worker processes, between a gateway and a detokenizer played by the test."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from token_rows import steps_of

from blockyard.shared.bus.links import Links
from blockyard.shared.config.services.process import BusConfig, ProcessConfig
from blockyard.shared.config.services.registry import RegistryConfig
from blockyard.shared.config.services.scheduler import SchedulerConfig
from blockyard.shared.config.services.worker import MockConfig, WorkerConfig
from blockyard.shared.messages import (
    Accepted,
    Attach,
    ChoiceState,
    DetokenizerIn,
    FinishReason,
    GatewayIn,
    Generate,
    Member,
    Role,
    Sampling,
    StreamOpen,
    TextOptions,
    TokenBatch,
    TokenStep,
)

ROOT = Path(__file__).parents[2]
LIMIT_S = 15.0


class Ring:
    """Processes of one test in one directory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bus = BusConfig(registry=f"ipc://{folder}/bus", bind=f"ipc://{folder}")
        self.running: list[subprocess.Popen[bytes]] = []

    def start(self, role: Role | str, config: msgspec.Struct) -> subprocess.Popen[bytes]:
        path = self.folder / f"{role}-{len(self.running)}.json"
        path.write_bytes(msgspec.json.encode(config))
        with (self.folder / f"{role}.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", f"blockyard.services.{role}", str(path)],
                env=os.environ | {"PYTHONPATH": str(ROOT / ".src")},
                stderr=log,
            )
        self.running.append(process)
        return process

    def scheduler(self, **more: object) -> subprocess.Popen[bytes]:
        process = ProcessConfig(name="scheduler", bus=self.bus)
        return self.start("scheduler", SchedulerConfig(process=process, served_model_names=["m"], **more))

    def worker(self, **mock: object) -> subprocess.Popen[bytes]:
        process = ProcessConfig(name="gpu_worker 0", bus=self.bus)
        config = WorkerConfig(
            process=process,
            model_path=str(self.folder),
            served_model_names=["m"],
            worker_cls="mock",
            mock=MockConfig(**mock),
        )
        return self.start("gpu_worker", config)


@pytest.fixture
def ring(tmp_path: Path) -> Iterator[Ring]:
    ring = Ring(tmp_path)
    ring.start("message_bus", RegistryConfig(process=ProcessConfig(name="bus", bus=ring.bus), settle_s=0.2))
    yield ring
    for process in ring.running:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
    for process in ring.running:
        process.wait(LIMIT_S)


class Ends:
    """Both ends of the scheduler: requests go in, token steps come out."""

    def __init__(self, gateway: Links[GatewayIn], detokenizer: Links[DetokenizerIn]) -> None:
        self.gateway, self.detokenizer = gateway, detokenizer
        self.accepted: list[Accepted] = []
        self.steps: list[TokenStep] = []
        self.streams: defaultdict[int, dict[int, StreamOpen]] = defaultdict(dict)  # by scheduler
        detokenizer.update(ready=True)

    def until(self, true: Callable[[], object]) -> None:
        until = time.monotonic() + LIMIT_S
        while not true():
            assert time.monotonic() < until, "nothing came"
            self.accepted += [e for _, e in self.gateway.poll(0.01) if isinstance(e, Accepted)]
            for scheduler, event in self.detokenizer.poll(0.01):
                if isinstance(event, TokenBatch):
                    self.steps += steps_of(event, self.streams[scheduler])

    def ids(self) -> list[int]:
        return [token for step in self.steps for token in step.token_ids]

    def scheduler(self) -> Member:
        self.until(lambda: self.gateway.of(Role.SCHEDULER, "m"))
        return self.gateway.of(Role.SCHEDULER, "m")[0]

    def generate(self, to: Member, request_id: str, max_tokens: int, **more: object) -> None:
        prompt = array("I", range(1, 20)).tobytes()
        choices = more.pop("choices", [ChoiceState(0)])
        frame = Generate(
            request_id, more.pop("attempt", 0), "m", prompt, b"", Sampling(max_tokens), TextOptions(), choices
        )
        assert self.gateway.send(to.incarnation, frame)


@contextlib.contextmanager
def ends(ring: Ring) -> Iterator[Ends]:
    with (
        Links[GatewayIn]("gateway", Role.API_GATEWAY, ring.bus, GatewayIn) as gateway,
        Links[DetokenizerIn]("detokenizer", Role.DETOKENIZER, ring.bus, DetokenizerIn) as detokenizer,
    ):
        yield Ends(gateway, detokenizer)


def test_tokens_flow_and_sigterm_ends_both(ring: Ring) -> None:
    scheduler, worker = ring.scheduler(), ring.worker()
    with ends(ring) as e:
        card = e.scheduler().card
        assert card is not None
        assert (card.names, card.max_model_len) == (["m"], 32768)
        e.generate(e.scheduler(), "r", 10)
        e.until(lambda: e.accepted and e.steps and e.steps[-1].finish is not None)
        assert e.accepted[0].detokenizer == e.detokenizer.me.incarnation
        assert [s.first for s in e.steps] == list(range(10))
        assert e.steps[-1].finish is FinishReason.LENGTH
        for process in (scheduler, worker):
            process.send_signal(signal.SIGTERM)
            begun = time.monotonic()
            assert process.wait(LIMIT_S) == 0
            assert time.monotonic() - begun < 4.0


def test_a_killed_worker_costs_a_pause(ring: Ring) -> None:
    ring.scheduler()
    worker = ring.worker(step_ms=20.0)
    with ends(ring) as e:
        e.generate(e.scheduler(), "r", 40)
        e.until(lambda: len(e.ids()) > 5)
        worker.kill()
        worker.wait()
        ring.worker()
        e.until(lambda: e.steps[-1].finish is not None)
        assert [s.first for s in e.steps] == list(range(40))


def test_a_killed_scheduler_is_replaced_and_goes_on_from_the_journal(ring: Ring) -> None:
    first = ring.scheduler()
    ring.worker(step_ms=20.0)
    with ends(ring) as e:
        old = e.scheduler()
        e.generate(old, "r", 40)
        e.until(lambda: len(e.ids()) > 5)
        first.kill()
        first.wait()
        e.until(lambda: old.incarnation not in e.gateway.members)
        before = e.ids()
        e.steps.clear()
        ring.scheduler()
        journal = [ChoiceState(0, array("I", before).tobytes())]
        e.generate(e.scheduler(), "r", 40, attempt=1, choices=journal)
        e.until(lambda: e.steps and e.steps[-1].finish is not None)
        assert [s.first for s in e.steps] == list(range(len(before), 40))
        whole = before + e.ids()
        e.steps.clear()
        e.generate(e.scheduler(), "again", 40)
        e.until(lambda: e.steps and e.steps[-1].finish is not None)
        assert e.ids() == whole


def test_a_fenced_scheduler_ends(ring: Ring) -> None:
    scheduler = ring.scheduler()
    ring.worker(step_ms=20.0)
    with ends(ring) as e:
        e.generate(e.scheduler(), "r", 1000)
        e.until(lambda: e.steps)
        worker = next(m for m in e.gateway.members.values() if m.role is Role.GPU_WORKER)
        e.gateway.send(worker.incarnation, Attach(e.gateway.me.incarnation, 4))
        assert scheduler.wait(LIMIT_S) == 1
    assert "has taken worker" in (ring.folder / "scheduler.log").read_text()
