"""The worker's loop: takes plans in order, launches them, answers each when it is done. A plain thread, without torch.

While steps are in flight it polls, links and runner in turn: one thread runs Python, and a wait inside the driver would
keep it from the next plan.
"""

import logging
import threading
from collections import deque

from blockyard.services.gpu_worker.counters import Counters
from blockyard.services.gpu_worker.interfaces import Done, Sleeper, WorkerLinks
from blockyard.shared.bus import Event, Gone, Joined
from blockyard.shared.errors import DeviceError
from blockyard.shared.messages import Attach, Attached, Fenced, OutOfStep, Sleep, Slept, StepPlan, StepResult, WorkerIn

log = logging.getLogger(__name__)

IDLE_POLL_S = 0.5
CHORE_POLL_S = 0.1  # after so long without anything to do the runner may do what takes a while


class Worker:
    """Obeys the scheduler that attached last. Plans that the runner cannot take yet wait in `plans`."""

    def __init__(self, links: WorkerLinks, runner: Sleeper) -> None:
        self._links, self._runner = links, runner
        self.plans: deque[StepPlan] = deque()
        self._scheduler: int | None = None
        self._next = 0  # number of the plan that is to come; 0: none before the next Attach
        self._has_chores = True  # the runner may have work for idle times
        self.counters = Counters(links, runner.geometry.num_blocks)

    def run(self, stopped: threading.Event) -> None:
        """Serves until `stopped`; the plans in flight are finished first."""
        while not stopped.is_set():
            busy = self.plans or self._runner.in_flight
            events = self._links.poll(0.0 if busy else CHORE_POLL_S if self._has_chores else IDLE_POLL_S)
            for peer, event in events:
                self.handle(peer, event)
            if self._has_chores and not events and not busy:
                self._has_chores = self._runner.idle()
            self.step()
            self.counters.publish()
        self.plans.clear()
        while self._runner.in_flight:
            self.step()

    def handle(self, peer: int, event: "Event | WorkerIn") -> None:
        match event:
            case Attach():
                self._attach(peer, event)
            case StepPlan():
                self._take(peer, event)
            case Sleep():
                self._sleep(peer, event)
            case Gone() if peer == self._scheduler:
                self.plans.clear()  # nobody is left to answer; KV and slots wait for the next Attach
                self._next = 0
            case Joined() if peer == self._scheduler and self._next == 0:  # it lived after all, and waits for results
                self._links.answer(peer, OutOfStep(self._links.me.incarnation, 1))

    def step(self) -> None:
        """Launches the oldest plan, if there is room for one, and answers those that are done.

        Raises DeviceError after an error of the runner's: of CUDA's nothing can be computed any more.
        """
        try:
            self._step()
        except RuntimeError as e:
            log.exception("the step loop ends")
            lines = str(e).splitlines() or [type(e).__name__]
            raise DeviceError(f"the device failed with {self._runner.in_flight} plans in flight: {lines[0]}") from e

    def _step(self) -> None:
        if self.plans and self._runner.can_launch():
            self._runner.launch(self.plans.popleft())
        elif not self._runner.in_flight:
            self.counters.idle()
            return
        for done in self._runner.collect():
            self._answer(done)

    def _answer(self, done: Done) -> None:
        """To nobody, where the scheduler is lost: its successor asks for the state, not for results."""
        plan = done.plan
        if self._next and plan.scheduler == self._scheduler:
            me, failed = self._links.me.incarnation, done.failed_fetches
            answer = StepResult(me, plan.number, done.slots, done.stamp_s, done.step_s, failed)
            self._links.answer(plan.scheduler, answer)
        self.counters.stepped(done.slots)

    def _attach(self, peer: int, attach: Attach) -> None:
        if self._scheduler not in (None, attach.scheduler):  # it may wait for results of plans that are dropped now
            self._links.answer(self._scheduler, Fenced(self._scheduler))
        self.plans.clear()
        self._runner.reset(attach.num_slots)
        if attach.forget:
            self._runner.forget_kv()
        self._scheduler, self._next = attach.scheduler, 1
        block_ids, names = self._runner.names.listed()
        me = self._links.me.incarnation
        host = self._runner.names.host_listed()
        self._links.answer(peer, Attached(me, attach.scheduler, self._runner.geometry, block_ids, names, *host))
        log.info("attached to scheduler %x with %d slots", attach.scheduler, attach.num_slots)

    def _sleep(self, peer: int, frame: Sleep) -> None:
        """Until the next Attach. Only the scheduler that has this worker may send it there."""
        if frame.scheduler != self._scheduler:
            self._links.answer(peer, Fenced(frame.scheduler))
            return
        self.plans.clear()
        self._next = 0
        freed = self._runner.sleep(frame.level)
        self._links.answer(peer, Slept(self._links.me.incarnation, frame.level, freed))

    def _take(self, peer: int, plan: StepPlan) -> None:
        if plan.scheduler != self._scheduler:
            log.warning("refused a plan of scheduler %x", plan.scheduler)
            self._links.answer(peer, Fenced(plan.scheduler))
        elif self._next == 0:
            return  # out of step, and said so: what is still under way from before counts no more
        elif plan.number != self._next:
            log.error("plan %d came where %d was due: slots dropped", plan.number, self._next)
            self._links.answer(peer, OutOfStep(self._links.me.incarnation, self._next))
            self.plans.clear()
            self._runner.reset(0)
            self._next = 0
        else:
            self._next += 1
            self.plans.append(plan)
