"""A worker without a model: the same messages, tokens at a set pace."""

import logging
import signal
import threading
import time

from blockyard.services.gpu_worker.mock_model import describe
from blockyard.services.gpu_worker.mock_plans import MockPlans
from blockyard.shared.bus import Links
from blockyard.shared.config.worker import WorkerConfig
from blockyard.shared.messages import Attach, Fenced, Role, Stats, StepPlan, WorkerIn

log = logging.getLogger(__name__)

IDLE_S = 0.1


def serve(config: WorkerConfig) -> None:
    """Runs until SIGTERM. Raises PlanError if the scheduler contradicts itself."""
    geometry, pattern = describe(config)
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    model = config.served_model_names[0] if config.served_model_names else ""
    with Links[WorkerIn](config.process.name, Role.GPU_WORKER, config.process.bus, WorkerIn, model) as links:
        plans = MockPlans(links.me.incarnation, geometry, pattern, config.mock.step_ms / 1000)
        note = f"mock worker: {geometry.num_blocks} KV blocks of {geometry.block_size} tokens, no weights"
        links.update(ready=True, phase="serving", progress=1.0, notes=[note], group=config.group)
        MockWorker(links, plans).run(stopped)


class MockWorker:
    def __init__(self, links: Links[WorkerIn], plans: MockPlans) -> None:
        self._links, self._plans = links, plans
        self._scheduler = 0  # incarnation that gets results

    def run(self, stopped: threading.Event) -> None:
        while not stopped.is_set():
            due = self._plans.due()
            timeout_s = IDLE_S if due is None else min(IDLE_S, max(0.0, due - time.monotonic()))
            for peer, event in self._links.poll(timeout_s):
                if isinstance(event, Attach | StepPlan):
                    self.handle(peer, event, time.monotonic())
            self.complete_due(time.monotonic())

    def handle(self, peer: int, frame: WorkerIn, now: float) -> None:
        if isinstance(frame, Attach):
            log.info("attached by scheduler %x", frame.scheduler)
            if self._scheduler not in (0, peer):  # it may wait for results of plans that are dropped now
                self._links.answer(self._scheduler, Fenced(self._scheduler))
            self._scheduler = peer
            self._links.answer(peer, self._plans.attach(frame))
            return
        problem = self._plans.take(frame, now)
        if problem is not None:
            log.warning("plan %d of scheduler %x: %s", frame.number, frame.scheduler, type(problem).__name__)
            self._links.answer(peer, problem)

    def complete_due(self, now: float) -> None:
        """Runs one plan if it is due, so that frames which came meanwhile are seen before the next."""
        due = self._plans.due()
        if due is not None and due <= now:
            self._links.answer(self._scheduler, self._plans.complete(time.time()))
            self._links.count(Stats(steps_total=self._plans.num_steps))
