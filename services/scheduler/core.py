"""The scheduler without its sockets: frames and membership in, frames out.

`step` is the loop: admit, build plans, send. `on_message` takes results and requests before it.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from blockyard.services.scheduler.admission.admission import capacity_of
from blockyard.services.scheduler.admission.request_handler import RequestHandler
from blockyard.services.scheduler.batch.worker_groups import BatchLimits, WorkerGroup, WorkerGroups
from blockyard.services.scheduler.kv_cache.prefix_cache import BlockHasher
from blockyard.services.scheduler.lifecycle.beam_sequences import BeamScheduler
from blockyard.services.scheduler.lifecycle.lifecycle import Lifecycle
from blockyard.services.scheduler.outbox import Outbox, Outgoing
from blockyard.services.scheduler.plan_pacer import WakeupTimers
from blockyard.services.scheduler.planning.partial_prefill_limits import PartialPrefillLimits
from blockyard.services.scheduler.planning.prefill_planner import PrefillPlanner
from blockyard.services.scheduler.planning.step_planner import StepPlanner
from blockyard.services.scheduler.planning.step_results import StepResults
from blockyard.services.scheduler.queue.policies import POLICIES
from blockyard.services.scheduler.queue.queue_bounds import QueueBounds
from blockyard.services.scheduler.queue.waiting_queue import WaitingQueue
from blockyard.services.scheduler.workers.admission_delay import AdmissionDelay
from blockyard.services.scheduler.workers.controls import Controls
from blockyard.services.scheduler.workers.router import Router
from blockyard.services.scheduler.workers.worker_sleep import WorkerSleep
from blockyard.shared.errors import BlockyardError
from blockyard.shared.messages import (
    Attached,
    Broken,
    Cancel,
    Control,
    Fenced,
    Generate,
    Member,
    ModelCard,
    OutOfStep,
    PathLost,
    QueueCapacityChanged,
    RefusalCount,
    Role,
    SchedulerIn,
    Slept,
    Stats,
    StepResult,
    Stop,
)

log = logging.getLogger(__name__)

MAX_TENANTS = 32  # in metrics


class FencedError(BlockyardError):
    """Another scheduler has taken the workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    names: list[str]  # served names
    root: str
    batch: BatchLimits
    max_queue_len: int
    max_queue_tokens: int
    max_queue_delay_s: float | None = None  # maximum wait of a new request
    delay_factor: float = 0.0  # see AdmissionDelay
    partial_prefills: PartialPrefillLimits = field(default_factory=PartialPrefillLimits)
    policy: str = "fcfs"
    may_sleep: bool = False
    prefix_caching: bool = True
    block_scope: str = ""  # what the KV of a block depends on besides tokens, as a text


class Scheduler:
    """Call `on_message` for each frame, then `step` for the frames to send."""

    def __init__(self, incarnation: int, settings: SchedulerSettings, created: int) -> None:
        self.card: ModelCard | None = None  # None until a group is attached; a new object after each change
        self.notes: list[str] = []
        self._settings, self._created = settings, created
        self._outbox, self._timers = Outbox(), WakeupTimers()
        self._waiting = WaitingQueue(POLICIES[settings.policy]())
        hasher = BlockHasher(settings.block_scope, settings.prefix_caching)
        self._groups = WorkerGroups(incarnation, settings.batch, hasher)
        self.groups = self._groups.attached  # by the worker's incarnation; not to be changed
        limits = (settings.max_queue_len, settings.max_queue_tokens, settings.max_queue_delay_s)
        self._bounds = QueueBounds(self._waiting, self.groups, *limits)
        self._lifecycle = Lifecycle(self._waiting, self._groups)
        beam_scheduler = BeamScheduler(self._waiting, self._groups, self._lifecycle)
        self._request_handler = RequestHandler(
            settings.names, self._waiting, self._bounds, self._lifecycle, self._outbox, beam_scheduler
        )
        acceptance = self._request_handler.acceptance
        self._router = Router(self._waiting, self.groups, acceptance)
        self._admission_delay = AdmissionDelay(settings.delay_factor)
        prefills = PrefillPlanner(
            self._waiting,
            self._lifecycle,
            acceptance,
            self._router,
            self._admission_delay,
            settings.partial_prefills,
        )
        self._planner = StepPlanner(incarnation, self._lifecycle, beam_scheduler, prefills)
        self._results = StepResults(self._waiting, self._lifecycle, beam_scheduler)
        self._sleep = WorkerSleep(incarnation, self._groups, self._bounds, self._outbox, self._clear)
        self._controls = Controls(self._groups, self._admission_delay, self._sleep, self._outbox, settings.may_sleep)
        self._gateways: set[int] = set()
        self._num_steps = 0
        self._answered: set[int] = set()  # workers with a result since the last call of `step`

    @property
    def before_preempt(self) -> list[Callable[[WorkerGroup], None]]:
        """Functions that are called before each preemption."""
        return self._lifecycle.before_preempt

    @property
    def phase(self) -> str:
        return self._controls.phase or ("serving" if self._groups.attached else "waiting for a worker")

    @property
    def idle(self) -> bool:
        """Nothing is in flight."""
        return not any(group.in_flight for group in self._groups.attached.values())

    def on_message(self, peer: int, frame: SchedulerIn, now: float) -> None:
        """Takes one frame. Raises FencedError when this scheduler has been replaced."""
        if isinstance(frame, StepResult):
            self._result(peer, frame, now)
            return
        if not isinstance(frame, Generate) or len(self.groups) < 2:
            self._groups.mark_dirty(self.groups.values())  # it may allow a plan in any group
        match frame:
            case Generate():  # with several groups, the router marks one of them
                self._gateways.add(peer)
                self._request_handler.generate(peer, frame, now)
            case Cancel() | Stop() | PathLost():
                self._request_handler.on_message(peer, frame)
            case Attached():
                self._attached(peer, frame)
            case Control():
                self._gateways.add(peer)
                self._controls.take(peer, frame, now)
            case Slept():
                self._sleep.on_slept(peer, frame)
            case OutOfStep():
                log.warning("worker %x expected plan %d: attaching it again", peer, frame.expected)
                self._attach_again(peer, now)
            case Broken() if peer in self.groups:
                self._admission_delay.quarantine.blame(self.groups[peer], frame.detail, now, self._lifecycle.fail)
                self.on_member_lost(peer)
            case Fenced():
                raise FencedError(f"another scheduler has taken worker {peer:x}: this one ends")

    def on_member(self, member: Member, now: float) -> None:
        """A member joined, or its entry changed."""
        if member.model not in ("", *self._settings.names):
            return
        if member.role is Role.GPU_WORKER and member.ready:
            if not self._groups.knows(member.incarnation) and not self._sleep.is_asleep(member.incarnation):
                self._outbox.send(member.incarnation, self._groups.attach_request(member.incarnation, now))
        elif member.role is Role.DETOKENIZER and member.ready:
            self._groups.mark_dirty(self.groups.values())
            self._lifecycle.streams.add_detokenizer(member.incarnation)
            self._tell_lost()
            self._request_handler.detokenizer_joined()
        elif member.role is Role.API_GATEWAY:
            self._gateways.add(member.incarnation)

    def on_member_lost(self, incarnation: int) -> None:
        """A member died, or its link broke with frames on it."""
        group = self._groups.detach(incarnation)
        if group is not None:
            self._clear(group)
            self._settle_capacity()
        self._controls.gone(incarnation)
        self._groups.mark_dirty(self.groups.values())
        self._lifecycle.streams.remove_detokenizer(incarnation, self._lifecycle.requests.values())
        self._tell_lost()
        if incarnation in self._gateways:
            self._gateways.discard(incarnation)
            self._lifecycle.drop_gateway(incarnation)
            self._outbox.answer(incarnation, PathLost(incarnation))  # it may be alive behind a broken link

    def step(self, now: float) -> list[Outgoing]:
        """Admits, builds plans, and returns the frames to send: plans first, because workers wait for them."""
        acceptance, quarantine = self._request_handler.acceptance, self._admission_delay.quarantine
        if quarantine.probations:
            quarantine.update()
        if now >= acceptance.next_expiry_s:
            self._request_handler.expire(now)
        for worker in self._groups.attach_overdue(now):
            self._outbox.send(worker, self._groups.attach_request(worker, now))
        if quarantine.probations:  # a quarantined request could wait behind others in the queue of a group
            self._router.requeue_all()
            self._groups.mark_dirty(self.groups.values())
        elif len(self.groups) > 1:
            self._groups.mark_dirty(self._router.route())
        if self._timers.heap:
            self._groups.mark_dirty(self.groups[w] for w in self._timers.take_due(now) if w in self.groups)
        self._build_plans(now)
        if self._controls.open:
            self._controls.settle(now)
        if now >= self._bounds.wait.next_sample_s:
            self._bounds.wait.sample(now, self._results.num_output_tokens, self._results.num_prompt_tokens)
        for text_outbox in self._lifecycle.streams.text_outboxes.values():
            text_outbox.flush(self._outbox)
        self._answered.clear()
        bounds = self._bounds
        if self._waiting.usage.amount.sequences or bounds.was_full or bounds.told_full:
            self._tell_capacity()
        return self._outbox.take()

    def _build_plans(self, now: float) -> None:
        """For each group to which something happened, as many plans as may be in flight."""
        while dirty := self._groups.take_dirty(now):
            for group in dirty:
                while self._timers.may_send(group.worker, group.pacer, now):
                    plan = self._planner.plan(group, now)
                    if plan is None:
                        break
                    group.pacer.on_sent(group.in_flight[-1].load, now)
                    self._outbox.plan(group.worker, plan)
            if len(self.groups) > 1 and not self._admission_delay.quarantine.probations:
                self._groups.mark_dirty(self._router.route())  # a sequence that was preempted may run in another group

    def _tell_capacity(self) -> None:
        capacity = self._bounds.changed_capacity()
        if capacity is not None:
            for gateway in self._gateways:
                self._outbox.answer(gateway, QueueCapacityChanged(capacity))

    def wake_at(self) -> float | None:
        """When to call `step` next if no frame comes."""
        return self._timers.next()

    def stats(self) -> Stats:
        groups = self._groups.attached.values()
        return Stats(
            running=sum(len(group.running) for group in groups),
            waiting=len(self._waiting) + self._lifecycle.parallel_sampling.num_awaiting_prompt,
            requests_total=self._request_handler.num_requests,
            prompt_tokens_total=self._results.num_prompt_tokens,
            output_tokens_total=self._results.num_output_tokens,
            preemptions_total=self._lifecycle.num_preemptions,
            blocks_used=sum(group.kv_cache.blocks.num_used for group in groups),
            blocks_total=sum(group.kv_cache.blocks.num_ids for group in groups),
            steps_total=self._num_steps,
            prefix_queries_total=self._groups.cache_stats.num_queries,
            prefix_hits_total=self._groups.cache_stats.num_hits,
            host_blocks_used=sum(group.kv_cache.blocks.host.num_used for group in groups),
            host_blocks_total=sum(group.kv_cache.blocks.host.num_ids for group in groups),
            blocks_saved_total=self._groups.cache_stats.num_saved,
            blocks_fetched_total=self._groups.cache_stats.num_fetched,
            waiting_tokens=self._waiting.usage.amount.tokens,
            wait_s=self._bounds.wait_s,
            displaced_total=self._planner.prefills.num_displaced,
            refused=[RefusalCount(reason, total) for reason, total in self._request_handler.num_refused.items()],
            tenants=self._waiting.policy.largest_tenants(MAX_TENANTS),
            step_sizes=list(self._results.step_sizes),
            step_tokens_total=self._results.num_step_tokens,
        )

    def _tell_lost(self) -> None:
        """Tells gateways of lost detokenizers. They know the affected requests best: some have ended here already."""
        for detokenizer in self._lifecycle.streams.take_lost():
            for gateway in self._gateways:
                self._outbox.answer(gateway, PathLost(detokenizer))

    def _result(self, peer: int, frame: StepResult, now: float) -> None:
        group = self._groups.attached.get(peer)
        if group is None:
            return  # the group was detached after the plan was sent
        record = group.on_answered(frame.number)
        if record is None or not record.matches(frame.token_ids):
            log.error("worker %x answered plan %d, which is not what was sent: attaching it again", peer, frame.number)
            self._attach_again(peer, now)
            return
        self._num_steps += 1
        group.pacer.on_completed(frame.step_s, frame.launch_s, frame.stamp_s, now)
        if peer in self._answered:
            self._lifecycle.streams.close_batches()
        self._answered.add(peer)
        self._groups.mark_dirty((group,))
        if record.chunk_sizes:
            self._admission_delay.on_prefill_step(frame.step_s)
        self._results.apply(group, record, frame)

    def _attached(self, peer: int, frame: Attached) -> None:
        group = self._groups.attach(peer, frame)
        if group is None:
            return
        group.kv_cache.restore(frame)
        self._groups.mark_dirty((group,))
        self._settle_capacity()
        self._sleep.on_attached(group)

    def _settle_capacity(self) -> None:
        """Updates the capacity for admission and gateways. While no group is attached the last one stays."""
        groups, settings = list(self._groups.attached.values()), self._settings
        if not groups:
            return
        capacity = capacity_of([g.geometry for g in groups])
        self._request_handler.admission.set_capacity(capacity)
        self.notes = capacity.notes(groups)
        card = capacity.card(settings.names, settings.root, self._created)
        if card != self.card:
            self.card = card

    def _attach_again(self, worker: int, now: float) -> None:
        if worker in self._groups.attached:  # otherwise it has been asked already
            group = self._groups.detach(worker)
            assert group is not None
            self._clear(group)
            self._outbox.send(worker, self._groups.attach_request(worker, now))

    def _clear(self, group: WorkerGroup, what: str = "is lost") -> None:
        level, num_running = logging.WARNING if group.running else logging.INFO, len(group.running)
        log.log(level, "worker %x %s; %d sequences that ran on it wait again", group.worker, what, num_running)
        self._router.remove_group(group)
        self._lifecycle.requeue_all(group)
