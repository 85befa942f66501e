"""The worker loop: launches plans in order and answers each with its result. Imports no torch.

While steps are in flight it polls links and runner in turn, because a wait inside the driver would delay the next plan.
"""

import logging
import os
import threading
import time
from array import array

import msgspec

from blockyard.services.gpu_worker.counters import Counters
from blockyard.services.gpu_worker.interfaces import (
    CompletedPlan,
    KVTransfers,
    SleepModeRunner,
    WorkerLinks,
    WorkerRanks,
)
from blockyard.services.gpu_worker.session import SchedulerSession
from blockyard.shared.errors import DeviceError, RankLostError
from blockyard.shared.messages import NO_LOGPROBS, NO_TOKEN, KVLanded, SlotResult, StepResult, encode_logprobs

log = logging.getLogger(__name__)

IDLE_POLL_S = 0.5
CHORE_POLL_S = 0.1  # idle time before the runner does background work
LANDED_POLL_S = 0.003  # after a KV transfer has landed: its plan follows within about a millisecond
LOAD_POLL_S = 0.0005  # while an adapter is read
TRANSFER_POLL_S = 0.001  # while a KV transfer waits for room on a link, which no socket reports


class Worker:
    """Runs the plans of `session` on `runner`. Plans that cannot be launched yet wait in `session.plans`."""

    def __init__(
        self,
        links: WorkerLinks,
        runner: SleepModeRunner,
        transfers: KVTransfers | None = None,
        ranks: WorkerRanks | None = None,
    ) -> None:
        """ranks: None: there is one."""
        self._links, self._runner, self._transfers, self._ranks = links, runner, transfers, ranks
        self.session = SchedulerSession(links, runner, transfers)
        self._has_chores = True  # the runner may have background work
        self._wait_s = CHORE_POLL_S  # before the next piece of background work
        self._is_loading = False  # an adapter is read
        self._plan_due_s = 0.0  # until this time a plan for landed blocks is expected
        self.counters = Counters(links, runner, transfers, ranks)

    def run(self, stopped: threading.Event) -> None:
        """Serves until `stopped`, then finishes the plans in flight and aborts KV transfers."""
        while not stopped.is_set():
            busy = bool(self.session.plans or self._runner.in_flight)
            events = self._links.poll(0.0 if busy else self._wait_s)
            for peer, event in events:
                self.session.handle(peer, event)
            if self._transfers is not None and self.move_blocks(self._transfers):
                self._has_chores = True
            elif busy or events:
                self._wait_s, self._has_chores = CHORE_POLL_S, True
            elif self._has_chores and not self._is_loading:  # each piece takes long, and adapters come first
                self._has_chores = self._runner.idle()
                self._wait_s = 0.0 if self._has_chores else IDLE_POLL_S
            else:
                self._wait_s = IDLE_POLL_S
            self._is_loading = self.session.is_loading_adapters(is_idle=not busy)
            if self._is_loading:
                self._wait_s = min(self._wait_s, LOAD_POLL_S)
            self.step()
            if self._ranks is not None and self._ranks.failure:
                raise self._broken(self._ranks.failure)
            self.counters.publish()
        self.session.plans.clear()
        while self._runner.in_flight:
            self.step()
        if self._transfers is not None:
            self._transfers.close()
            self.session.answer_transfers(self._transfers.poll())

    def step(self) -> None:
        """Launches the oldest plan, if the runner can launch one, and answers the completed plans.

        Raises DeviceError if the runner fails, or another rank's device, because no step can run after a CUDA error.
        Raises RankLostError if another rank is gone.
        """
        try:
            self._step()
        except RankLostError:
            if self._ranks is not None and self._ranks.failure:  # it is known before the other ranks end
                raise self._broken(self._ranks.failure) from None
            raise
        except RuntimeError as e:
            log.exception("the step loop ends")
            lines = str(e).splitlines() or [type(e).__name__]
            raise self._broken(lines[0]) from e

    def _broken(self, detail: str) -> DeviceError:
        """Tells the scheduler, which looks for a request that may have caused it. Returns the error to raise."""
        self.session.report_broken(detail)
        return DeviceError(f"the device failed with {self._runner.in_flight} plans in flight: {detail}")

    def _step(self) -> None:
        if self.session.plans and self._runner.can_launch():
            plan = self.session.plans.popleft()
            stored = self._runner.launch(plan)
            if stored and self._transfers is not None:
                self._transfers.on_launched(plan, stored)
        elif not self.session.plans and self._runner.join_step():
            pass  # rows of other replicas went through the experts of this one
        elif not self._runner.in_flight:
            self.counters.idle()
            return
        for done in self._runner.collect():
            self._answer(done)
        self._runner.sample_rows()

    def move_blocks(self, transfers: KVTransfers) -> bool:
        """Polls KV transfers. Returns whether some are open, or one has just landed: the runner does no background work
        meanwhile."""
        answers = transfers.poll()
        self.session.answer_transfers(answers)
        if answers and any(isinstance(it, KVLanded) and it.is_ended and it.blocks for it in answers):
            self._plan_due_s = time.monotonic() + LANDED_POLL_S
        if transfers.needs_polling or time.monotonic() < self._plan_due_s:
            self._wait_s = 0.0  # a wait would wake up later
            os.sched_yield()  # the thread that sends the answers may be waiting for this core
            return True
        if not transfers.num_open:
            return False
        self._wait_s = TRANSFER_POLL_S if transfers.busy else CHORE_POLL_S
        return True

    def _answer(self, done: CompletedPlan) -> None:
        plan = done.plan
        if self.session.expects_result(plan):
            slots, token_ids, logprobs = packed(done)
            times = (done.stamp_s, done.step_s, done.failed_fetches, token_ids, done.launch_s)
            answer = StepResult(plan.number, slots, *times, logprobs, done.packed)
            self._links.answer(plan.scheduler, answer)
            if plan.sends and self._transfers is not None:
                self._transfers.on_plan_done(plan)
                self.move_blocks(self._transfers)
        self.counters.stepped(done)


def packed(done: CompletedPlan) -> tuple[list[SlotResult], bytes, list[msgspec.Raw]]:
    """Returns the results that are more than one token, and token ids and log-probabilities of the others, by run."""
    runs, rows = done.plan.runs, done.decode_outputs
    token_ids = array("I", rows.token_ids_by_run(runs)) if rows else array("I", [NO_TOKEN]) * len(runs)
    if not done.slot_results:
        return [], token_ids.tobytes() if rows else b"", []
    places = {run.slot: i for i, run in enumerate(runs) if run.max_tokens == 1}
    others: list[SlotResult] = []
    logprobs: list[msgspec.Raw] = []
    for result in done.slot_results:
        place = places.get(result.slot)
        if place is None or not _is_plain(result):
            others.append(result)
        else:
            token_ids[place] = result.token_ids[0]
            if result.logprobs:
                logprobs = logprobs or [NO_LOGPROBS] * len(runs)
                logprobs[place] = encode_logprobs(result.logprobs[0])
    return others, token_ids.tobytes() if rows or len(others) < len(done.slot_results) else b"", logprobs


def _is_plain(result: SlotResult) -> bool:
    """Returns whether a result is one token, perhaps with log-probabilities, without any other field."""
    return len(result.token_ids) == 1 and result.finish is None and not result.prompt_logprobs and not result.detail
