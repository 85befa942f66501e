"""Handles workers that join, attach, are lost or sleep, and finds where waiting sequences may start."""

import logging
from collections.abc import Iterable

from blockyard.services.scheduler.admission.model_limits import ModelLimits, exchange
from blockyard.services.scheduler.batch.worker_groups import WorkerGroup, WorkerGroups
from blockyard.services.scheduler.lifecycle.lifecycle import Lifecycle
from blockyard.services.scheduler.outbox import Outbox
from blockyard.services.scheduler.transfers.notices import TransferNotices
from blockyard.services.scheduler.workers.router import Router
from blockyard.shared.messages import Attached, Geometry, KVRole, OutOfStep

log = logging.getLogger(__name__)


class LayoutCheck:
    """Warns of workers of different roles that cannot exchange KV blocks, once for each pair of layouts."""

    def __init__(self) -> None:
        self._compared: set[frozenset[tuple[KVRole, str]]] = set()

    def on_attached(self, worker: int, geometry: Geometry, attached: Iterable[tuple[int, Geometry]]) -> None:
        """Compares a new worker with the attached ones of other roles. A worker that is lost is in no warning."""
        role = geometry.kv_role
        for other, theirs in attached:
            pair = frozenset({(role, geometry.kv_layout), (theirs.kv_role, theirs.kv_layout)})
            if role is theirs.kv_role or pair in self._compared:
                continue
            self._compared.add(pair)
            if not exchange(geometry, theirs):
                log.warning(
                    "workers %x (%s) and %x (%s) exchange no KV blocks: %s",
                    worker,
                    role,
                    other,
                    theirs.kv_role,
                    _reason({worker: geometry, other: theirs}),
                )


def _reason(two: dict[int, Geometry]) -> str:
    for worker, geometry in two.items():
        if not geometry.kv_layout:
            return f"{worker:x} has no KV transfers; start it with --role"
    mine, theirs = two.values()
    parts = zip(mine.kv_layout.split("; "), theirs.kv_layout.split("; "), strict=False)
    differing = [f"{part} and {other}" for part, other in parts if part != other]
    return "; ".join(differing) or f"block size {mine.block_size} and {theirs.block_size}"


class Workers:
    """Attaches workers, and makes the sequences of a group wait again that is detached."""

    def __init__(
        self,
        groups: WorkerGroups,
        lifecycle: Lifecycle,
        model_limits: ModelLimits,
        router: Router,
        transfer_notices: TransferNotices,
        outbox: Outbox,
    ) -> None:
        self._groups, self._lifecycle, self._model_limits, self._outbox = groups, lifecycle, model_limits, outbox
        self._router, self._transfer_notices = router, transfer_notices
        self._layouts = LayoutCheck()

    def on_ready(self, worker: int, now: float) -> None:
        """A worker joined, or is ready again."""
        if not self._groups.knows(worker):
            self._attach(worker, now)

    def on_attached(self, worker: int, frame: Attached) -> WorkerGroup | None:
        """The new group; None if the answer does not count."""
        group = self._groups.attach(worker, frame)
        if group is None:
            return None
        group.kv_cache.restore(frame)
        self._transfer_notices.on_attached(group, frame)
        self._router.on_groups_changed()
        self._groups.mark_dirty((group,))
        self._model_limits.update_capacity(self._groups.attached.values())
        attached = ((other, one.geometry) for other, one in self._groups.attached.items())
        self._layouts.on_attached(worker, group.geometry, attached)
        return group

    def on_out_of_step(self, worker: int, frame: OutOfStep, now: float) -> None:
        log.warning("worker %x expected plan %d: attaching it again", worker, frame.expected)
        self.attach_again(worker, now)

    def on_lost(self, member: int) -> None:
        """A member is lost, which may be a worker."""
        group = self._groups.detach(member)
        if group is not None:
            self.requeue(group, is_lost=True)
            self._model_limits.update_capacity(self._groups.attached.values())
        else:
            self._transfer_notices.on_detached(member, is_lost=True)

    def attach_again(self, worker: int, now: float) -> None:
        """A worker and its group do not agree on the plans: the group begins anew."""
        group = self._groups.attached.get(worker)
        if group is not None:  # otherwise it has been asked already
            self._groups.detach(worker)
            self.requeue(group)
            self._attach(worker, now)

    def repeat_attach(self, now: float) -> None:
        """Asks workers again that have not answered."""
        for worker, frame in self._groups.attach_overdue(now):
            self._outbox.send(worker, frame)

    def requeue(self, group: WorkerGroup, what: str = "is lost", is_lost: bool = False) -> None:
        """The sequences of a detached group wait again. `what`: why, for the log. With `is_lost` the worker answers no
        question."""
        level, num_running = logging.WARNING if group.running else logging.INFO, len(group.running)
        log.log(level, "worker %x %s; %d sequences that ran on it wait again", group.worker, what, num_running)
        self._transfer_notices.on_detached(group.worker, is_lost)
        self._router.remove_group(group)
        self._lifecycle.requeue_all(group)
        if self._router.on_groups_changed():  # sequences that were routed to pairs with this group are routed again
            self._router.requeue_all()
        self._groups.mark_all_dirty()  # they may run in any other group

    def _attach(self, worker: int, now: float) -> None:
        self._outbox.send(worker, self._groups.attach_request(worker, now))
