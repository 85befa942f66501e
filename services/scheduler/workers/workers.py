"""Handles workers that join, attach, are lost or sleep, and finds where waiting sequences may start."""

import logging

from blockyard.services.scheduler.admission.request_handler import RequestHandler
from blockyard.services.scheduler.batch.worker_groups import WorkerGroup, WorkerGroups
from blockyard.services.scheduler.lifecycle.lifecycle import Lifecycle
from blockyard.services.scheduler.outbox import Outbox
from blockyard.services.scheduler.workers.admission_delay import AdmissionDelay
from blockyard.services.scheduler.workers.controls import Controls
from blockyard.services.scheduler.workers.layout_check import LayoutCheck
from blockyard.services.scheduler.workers.router import Router
from blockyard.services.scheduler.workers.worker_sleep import WorkerSleep
from blockyard.shared.messages import Attached, Control, OutOfStep, Slept

log = logging.getLogger(__name__)


class Workers:
    """Takes the frames and the membership of workers; the core calls `update`, `route` and `answer_controls` a step."""

    def __init__(
        self,
        groups: WorkerGroups,
        lifecycle: Lifecycle,
        requests: RequestHandler,
        outbox: Outbox,
        delay_factor: float,
        may_sleep: bool,
        decode_prefill_tokens: int,
    ) -> None:
        """`delay_factor`: see `AdmissionDelay`. `may_sleep`: the workers were started with sleep mode.

        `decode_prefill_tokens`: see `RoleRouter`.
        """
        self._transfer_notices = lifecycle.transfer_notices
        self.router = Router(
            lifecycle.waiting, groups.attached, requests.acceptance, lifecycle.handovers, decode_prefill_tokens
        )
        self.admission_delay = AdmissionDelay(delay_factor)
        self._quarantine = self.admission_delay.quarantine
        self._groups, self._lifecycle, self._outbox = groups, lifecycle, outbox
        self._admission = requests.admission
        self._layouts = LayoutCheck()
        # `_requeue` is passed as a function: a group that is put to sleep is dropped as if it were lost
        self._sleep = WorkerSleep(groups, requests.bounds, outbox, self._requeue)
        self._controls = Controls(groups, self.admission_delay, self._sleep, outbox, may_sleep)

    @property
    def phase(self) -> str:
        """Empty during normal operation."""
        return self._controls.phase

    def on_ready(self, worker: int, now: float) -> None:
        """A worker joined, or is ready again."""
        if not self._groups.knows(worker) and not self._sleep.is_asleep(worker):
            self._attach(worker, now)

    def on_message(self, worker: int, frame: Attached | Slept | OutOfStep, now: float) -> None:
        match frame:
            case Attached():
                self._on_attached(worker, frame)
            case Slept():
                self._sleep.on_slept(worker, frame)
            case OutOfStep():
                log.warning("worker %x expected plan %d: attaching it again", worker, frame.expected)
                self.attach_again(worker, now)

    def on_control(self, gateway: int, frame: Control, now: float) -> None:
        self._controls.take(gateway, frame, now)

    def on_broken(self, group: WorkerGroup, detail: str, now: float) -> None:
        """The device of a worker failed. The caller reports the worker as lost after it."""
        self._quarantine.blame(group, detail, now, self._lifecycle.fail)

    def on_lost(self, member: int) -> None:
        """A member is lost, which may be a worker or a gateway that has sent controls."""
        group = self._groups.detach(member)
        if group is not None:
            self._requeue(group, is_lost=True)
            self._admission.update_capacity(self._groups.attached.values())
        else:
            self._transfer_notices.on_detached(member, is_lost=True)
        self._controls.on_lost(member)

    def attach_again(self, worker: int, now: float) -> None:
        """A worker and its group do not agree on the plans: the group begins anew."""
        group = self._groups.attached.get(worker)
        if group is not None:  # otherwise it has been asked already
            self._groups.detach(worker)
            self._requeue(group)
            self._attach(worker, now)

    def update(self, now: float) -> None:
        """Called before sequences are routed: ends the quarantine of requests that survived, and repeats Attach."""
        if self._quarantine.probations:
            self._quarantine.update()
        if now >= self._transfer_notices.check_at:
            self._transfer_notices.update(now)
        if self._groups.asked:
            for worker, frame in self._groups.attach_overdue(now):
                self._outbox.send(worker, frame)

    def route(self) -> None:
        """Called before plans are built: with several groups, moves waiting sequences to group queues."""
        if self._quarantine.probations:  # a quarantined request could wait behind others in the queue of a group
            self.router.requeue_all()
            self._groups.mark_all_dirty()
        elif len(self._groups.attached) > 1:
            self._groups.mark_dirty(self.router.route())

    def route_preempted(self) -> None:
        """Called after plans were built: a sequence that was preempted may run in another group."""
        if len(self._groups.attached) > 1 and not self._quarantine.probations:
            self._groups.mark_dirty(self.router.route())

    def answer_controls(self, now: float) -> None:
        """Called after plans were built: answers the controls that are done."""
        if self._controls.open:
            self._controls.answer_done(now)

    def _attach(self, worker: int, now: float) -> None:
        self._outbox.send(worker, self._groups.attach_request(worker, now))

    def _on_attached(self, worker: int, frame: Attached) -> None:
        group = self._groups.attach(worker, frame)
        if group is None:
            return
        group.kv_cache.restore(frame)
        self._transfer_notices.on_attached(group, frame)
        self.router.roles.set_groups(self._groups.attached.values())
        self._groups.mark_dirty((group,))
        self._admission.update_capacity(self._groups.attached.values())
        attached = ((other, one.geometry) for other, one in self._groups.attached.items())
        self._layouts.on_attached(worker, group.geometry, attached)
        self._sleep.on_attached(group)

    def _requeue(self, group: WorkerGroup, what: str = "is lost", is_lost: bool = False) -> None:
        """The sequences of a detached group wait again. With `is_lost` the worker answers no question."""
        level, num_running = logging.WARNING if group.running else logging.INFO, len(group.running)
        log.log(level, "worker %x %s; %d sequences that ran on it wait again", group.worker, what, num_running)
        self._transfer_notices.on_detached(group.worker, is_lost)
        self.router.remove_group(group)
        self._lifecycle.requeue_all(group)
        was_active = self.router.roles.is_active
        self.router.roles.set_groups(self._groups.attached.values())
        if was_active:  # sequences that were routed to pairs with this group are routed again
            self.router.requeue_all()
            self._groups.mark_all_dirty()
