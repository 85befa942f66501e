"""The scheduler without its sockets: frames and membership in, frames out.

`on_message` receives; `step` is the loop: admit, build plans, send.
"""

import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from blockyard.services.scheduler.admission.admission import ServedModel
from blockyard.services.scheduler.admission.request_handler import RequestHandler
from blockyard.services.scheduler.batch.worker_groups import BatchLimits, WorkerGroup, WorkerGroups
from blockyard.services.scheduler.kv_cache.prefix_cache import BlockHasher
from blockyard.services.scheduler.lifecycle.lifecycle import Lifecycle
from blockyard.services.scheduler.outbox import Outbox, Outgoing
from blockyard.services.scheduler.planning.partial_prefill_limits import PartialPrefillLimits
from blockyard.services.scheduler.planning.step_planner import StepPlanner
from blockyard.services.scheduler.queue.policies import POLICIES
from blockyard.services.scheduler.queue.queue_bounds import QueueLimits
from blockyard.services.scheduler.transfers.handovers import TransferSettings
from blockyard.services.scheduler.workers.workers import Workers
from blockyard.shared.errors import BlockyardError
from blockyard.shared.messages import (
    DEFAULT_SETTINGS,
    Attached,
    Broken,
    Cancel,
    Control,
    Fenced,
    Generate,
    KVLanded,
    KVOpenTransfers,
    KVRole,
    KVSendEnded,
    Member,
    ModelCard,
    ModelSettings,
    OutOfStep,
    PathLost,
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
    model: ModelSettings = DEFAULT_SETTINGS  # for gateways
    batch: BatchLimits
    max_queue_len: int
    max_queue_tokens: int
    max_queue_delay_s: float | None = None  # maximum wait of a new request
    delay_factor: float = 0.0  # see AdmissionDelay
    partial_prefills: PartialPrefillLimits = field(default_factory=PartialPrefillLimits)
    policy: str = "fcfs"
    may_sleep: bool = False
    prefix_caching: bool = True
    decode_prefill_tokens: int = 128  # a prompt of which a decoding group lacks no more is computed there
    kv_lease_s: float = 30.0  # after a transfer's last block was sent, before its workers are asked about it
    load_failure_policy: Literal["recompute", "fail"] = "recompute"  # of blocks that did not land
    block_scope: str = ""  # what the KV of a block depends on besides tokens, as a text


class Scheduler:
    """Call `on_message` for each frame, then `step` for the frames to send."""

    def __init__(
        self,
        incarnation: int,
        settings: SchedulerSettings,
        created: int,
        random_bytes: Callable[[int], bytes] = secrets.token_bytes,
    ) -> None:
        """`random_bytes`: for tickets, which a stranger may not guess."""
        model = ServedModel(settings.names, settings.root, created, settings.model)
        limits = QueueLimits(settings.max_queue_len, settings.max_queue_tokens, settings.max_queue_delay_s)
        hasher = BlockHasher(settings.block_scope, settings.prefix_caching)
        self._names = settings.names
        self._num_steps = 0
        self._answered: set[int] = set()  # workers with a result since the last call of `step`

        self._outbox = Outbox()
        self._groups = WorkerGroups(incarnation, settings.batch, hasher)
        transfers = TransferSettings(settings.kv_lease_s, random_bytes, settings.load_failure_policy == "fail")
        self._lifecycle = Lifecycle(POLICIES[settings.policy](), self._groups, self._outbox, transfers)
        self._requests = RequestHandler(model, limits, self._lifecycle, self._groups, self._outbox)
        self._workers = Workers(
            self._groups,
            self._lifecycle,
            self._requests,
            self._outbox,
            settings.delay_factor,
            settings.may_sleep,
            settings.decode_prefill_tokens,
        )
        self._planner = StepPlanner(
            incarnation, self._lifecycle, self._requests, self._workers, settings.partial_prefills
        )
        self.groups = self._groups.attached  # by the worker's incarnation

    @property
    def before_preempt(self) -> list[Callable[[WorkerGroup], None]]:
        """Functions that are called before each preemption."""
        return self._lifecycle.before_preempt

    @property
    def card(self) -> ModelCard | None:
        """None until a group is attached; a new object after each change."""
        return self._requests.admission.card

    @property
    def notes(self) -> list[str]:
        """Lines for the start-up report."""
        return self._requests.admission.notes

    @property
    def roles(self) -> frozenset[KVRole]:
        """Returns the roles of the groups in `notes`."""
        return self._requests.admission.roles

    @property
    def phase(self) -> str:
        return self._workers.phase or ("serving" if self.groups else "waiting for a worker")

    @property
    def idle(self) -> bool:
        """Nothing is in flight."""
        return not any(group.in_flight for group in self.groups.values())

    # receive

    def on_message(self, peer: int, frame: SchedulerIn, now: float) -> None:
        """Takes one frame. Raises FencedError when this scheduler has been replaced."""
        if isinstance(frame, StepResult):
            self._on_result(peer, frame, now)
            return
        if not isinstance(frame, Generate | KVLanded | KVSendEnded | KVOpenTransfers) or len(self.groups) < 2:
            self._groups.mark_all_dirty()  # with several groups, the router marks the group of a new request
        match frame:
            case Generate() | Cancel() | Stop() | PathLost():
                self._requests.on_message(peer, frame, now)
            case Control():
                self._requests.gateways.add(peer)
                self._workers.on_control(peer, frame, now)
            case Attached() | Slept() | OutOfStep():
                self._workers.on_message(peer, frame, now)
            case KVOpenTransfers():
                self._lifecycle.transfer_notices.on_audited(peer, frame, now)
            case KVLanded() | KVSendEnded():
                self._lifecycle.transfer_notices.on_message(peer, frame, now)
            case Broken() if peer in self.groups:
                self._workers.on_broken(self.groups[peer], frame.detail, now)
                self.on_member_lost(peer)
            case Fenced():
                raise FencedError(f"another scheduler has taken worker {peer:x}: this one ends")

    def on_member(self, member: Member, now: float) -> None:
        """A member joined, or its entry changed."""
        if member.model not in ("", *self._names):
            return
        if member.role is Role.GPU_WORKER and member.ready:
            self._workers.on_ready(member.incarnation, now)
        elif member.role is Role.DETOKENIZER and member.ready:
            self._groups.mark_all_dirty()
            self._requests.on_detokenizer(member.incarnation)
        elif member.role is Role.API_GATEWAY:
            self._requests.gateways.add(member.incarnation)

    def on_member_lost(self, incarnation: int) -> None:
        """A member died, or its link broke with frames on it."""
        self._workers.on_lost(incarnation)
        self._groups.mark_all_dirty()
        self._requests.on_member_lost(incarnation)

    def _on_result(self, worker: int, result: StepResult, now: float) -> None:
        group = self.groups.get(worker)
        if group is None:
            return  # the group was detached after the plan was sent
        record = group.on_answered(result.number)
        if record is None or not record.matches(result):
            log.error(
                "worker %x answered plan %d, which is not what was sent: attaching it again", worker, result.number
            )
            self._workers.attach_again(worker, now)
            return
        self._num_steps += 1
        group.pacer.on_completed(result.step_s, result.launch_s, result.stamp_s, now)
        if worker in self._answered:
            self._lifecycle.streams.end_batches()
        self._answered.add(worker)
        self._groups.mark_dirty((group,))
        if record.chunk_sizes:
            self._workers.admission_delay.on_prefill_step(result.step_s)
        self._planner.results.apply(group, record, result, now)

    # admit, build plans, send

    def step(self, now: float) -> list[Outgoing]:
        """Admits, builds plans, and returns the frames to send: plans first, because workers wait for them."""
        self._workers.update(now)
        if now >= self._requests.acceptance.next_expiry_s:
            self._requests.expire(now)
        self._workers.route()
        self._build_plans(now)
        self._workers.answer_controls(now)
        return self._take_frames(now)

    def wake_at(self) -> float | None:
        """When to call `step` next if no frame comes."""
        return self._groups.timers.next()

    def _build_plans(self, now: float) -> None:
        """For each group to which something happened, as many plans as may be in flight."""
        while dirty := self._groups.take_dirty(now):
            for group in dirty:
                while self._groups.timers.may_send(group.worker, group.pacer, now):
                    plan = self._planner.plan(group, now)
                    if plan is None:
                        break
                    group.pacer.on_sent(group.in_flight[-1].load, now)
                    self._outbox.plan(group.worker, plan)
            self._workers.route_preempted()

    def _take_frames(self, now: float) -> list[Outgoing]:
        bounds, results = self._requests.bounds, self._planner.results
        if now >= bounds.wait.next_sample_s:
            bounds.wait.sample(now, results.num_output_tokens, results.num_prompt_tokens)
        for text_outbox in self._lifecycle.streams.text_outboxes.values():
            text_outbox.flush(self._outbox)
        self._lifecycle.vectors.flush(self._outbox)
        self._answered.clear()
        if self._lifecycle.waiting.usage.amount.sequences or bounds.was_full or bounds.told_full:
            self._requests.tell_capacity()
        return self._outbox.take()

    def stats(self) -> Stats:
        lifecycle, requests, results = self._lifecycle, self._requests, self._planner.results
        ledger = lifecycle.handovers.ledger
        groups, cache_stats, waiting = self.groups.values(), self._groups.cache_stats, lifecycle.waiting
        return Stats(
            running=sum(len(group.running) for group in groups),
            waiting=len(waiting) + lifecycle.parallel_sampling.num_awaiting_prompt + lifecycle.handovers.num_arriving,
            requests_total=requests.num_requests,
            prompt_tokens_total=results.num_prompt_tokens,
            output_tokens_total=results.num_output_tokens,
            preemptions_total=lifecycle.num_preemptions,
            blocks_used=sum(group.kv_cache.blocks.num_used for group in groups),
            blocks_total=sum(group.kv_cache.blocks.num_ids for group in groups),
            steps_total=self._num_steps,
            prefix_queries_total=cache_stats.num_queries,
            prefix_hits_total=cache_stats.num_hits,
            host_blocks_used=sum(group.kv_cache.blocks.host.num_used for group in groups),
            host_blocks_total=sum(group.kv_cache.blocks.host.num_ids for group in groups),
            blocks_saved_total=cache_stats.num_saved,
            blocks_fetched_total=cache_stats.num_fetched,
            waiting_tokens=waiting.usage.amount.tokens,
            wait_s=requests.bounds.wait_s,
            displaced_total=self._planner.prefills.num_displaced,
            refused=[RefusalCount(reason, total) for reason, total in requests.num_refused.items()],
            tenants=waiting.policy.largest_tenants(MAX_TENANTS),
            step_sizes=list(results.step_sizes),
            step_tokens_total=results.num_step_tokens,
            arriving=lifecycle.handovers.num_arriving,
            transfers_open=len(ledger.transfers),
            transfers_landed_total=ledger.num_landed,
            transfers_aborted_total=ledger.num_aborted,
            blocks_quarantined=ledger.num_quarantined,
            transfer_blocks_failed_total=ledger.num_failed_blocks,
            transfer_notices_dropped_total=ledger.num_dropped,
            transfer_audit_differences_total=lifecycle.handovers.audit.num_differences,
            second_token_counts=list(results.second_tokens),
            second_token_us_total=round(1e6 * results.second_token_s),
        )
