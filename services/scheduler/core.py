"""The scheduler without its sockets: frames and membership in, frames out.

`on_message` receives; `step` is the loop: admit, build plans, send.
"""

import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from blockyard.services.scheduler.adapters.registry import AdapterRegistry
from blockyard.services.scheduler.admission.gateways import Gateways
from blockyard.services.scheduler.admission.model_limits import ModelLimits, ServedModel
from blockyard.services.scheduler.admission.request_handler import Acceptance, RequestHandler
from blockyard.services.scheduler.batch.worker_groups import BatchLimits, WorkerGroup, WorkerGroups
from blockyard.services.scheduler.kv_cache.prefix_cache import BlockHasher
from blockyard.services.scheduler.lifecycle.beam_sequences import BeamScheduler
from blockyard.services.scheduler.lifecycle.detokenizer_streams import DetokenizerStreams
from blockyard.services.scheduler.lifecycle.lifecycle import Lifecycle
from blockyard.services.scheduler.lifecycle.parallel_sampling import ParallelSampling
from blockyard.services.scheduler.outbox import Outbox, Outgoing, VectorOutbox
from blockyard.services.scheduler.planning.fair_step_limiter import FairStepLimiter
from blockyard.services.scheduler.planning.partial_prefill_limits import PartialPrefillLimits, PartialPrefills
from blockyard.services.scheduler.planning.prefill_delay import PrefillDelay
from blockyard.services.scheduler.planning.prefill_planner import PrefillLimits, PrefillPlanner
from blockyard.services.scheduler.planning.result_applier import ResultApplier
from blockyard.services.scheduler.planning.step_planner import StepPlanner
from blockyard.services.scheduler.queue.adapter_waits import AdapterWaits
from blockyard.services.scheduler.queue.policies import POLICIES
from blockyard.services.scheduler.queue.policy import BatchLinesLast, Policy
from blockyard.services.scheduler.queue.queue_bounds import QueueBounds, QueueLimits
from blockyard.services.scheduler.queue.wait_estimate import WaitEstimate
from blockyard.services.scheduler.queue.waiting_queue import WaitingQueue
from blockyard.services.scheduler.sequences.requests import Sequence
from blockyard.services.scheduler.transfers.audit import TransferAudit
from blockyard.services.scheduler.transfers.failures import LinkBackoff
from blockyard.services.scheduler.transfers.handovers import Handovers, TransferSettings
from blockyard.services.scheduler.transfers.ledger import TransferLedger
from blockyard.services.scheduler.transfers.notices import TransferNotices
from blockyard.services.scheduler.workers.adapter_loads import AdapterLoads
from blockyard.services.scheduler.workers.controls import Controls
from blockyard.services.scheduler.workers.crash_quarantine import CrashQuarantine
from blockyard.services.scheduler.workers.router import Router
from blockyard.services.scheduler.workers.worker_sleep import WorkerSleep
from blockyard.services.scheduler.workers.workers import Workers
from blockyard.shared.config.services.lora import AdapterSettings
from blockyard.shared.errors import BlockyardError
from blockyard.shared.messages import (
    DEFAULT_SETTINGS,
    AdapterLoaded,
    Attached,
    Broken,
    Cancel,
    Control,
    ControlVerb,
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
    Pool,
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
    delay_factor: float = 0.0  # see PrefillDelay
    partial_prefills: PartialPrefillLimits = field(default_factory=PartialPrefillLimits)
    policy: str = "fcfs"
    may_sleep: bool = False
    prefix_caching: bool = True
    decode_prefill_tokens: int = 128  # a prompt of which a decoding group lacks no more is computed there
    kv_lease_s: float = 30.0  # after a transfer's last block was sent, before its workers are asked about it
    load_failure_policy: Literal["recompute", "fail"] = "recompute"  # of blocks that did not land
    block_scope: str = ""  # what the KV of a block depends on besides tokens, as a text
    reserve_whole_prompts: bool = True  # a prompt starts with blocks for all of its tokens
    adapters: AdapterSettings = field(default_factory=AdapterSettings)


class Scheduler:
    """Call `on_message` for each frame, then `step` for the frames to send."""

    def __init__(
        self,
        incarnation: int,
        settings: SchedulerSettings,
        created: int,
        random_bytes: Callable[[int], bytes] = secrets.token_bytes,
    ) -> None:
        """`random_bytes`: for tickets, which a stranger may not guess.

        Each part is made here, once, and given to its users. Limits that are off are None.
        """
        self._names, self._num_steps = settings.names, 0
        self._answered: set[int] = set()  # workers with a result since the last call of `step`
        policy = BatchLinesLast(POLICIES[settings.policy]())
        self.outbox = Outbox()
        self.worker_groups = WorkerGroups(
            incarnation, settings.batch, BlockHasher(settings.block_scope, settings.prefix_caching)
        )
        self.groups = self.worker_groups.attached  # by the worker's incarnation
        self._make_queue(settings, policy)
        self._make_transfers(incarnation, settings, random_bytes)
        self.adapters = AdapterRegistry()
        self.lifecycle = Lifecycle(
            self.worker_groups,
            self.waiting,
            self.parallel_sampling,
            self.handovers,
            self.streams,
            self.vectors,
            self.adapters,
        )
        self.beams = BeamScheduler(self.lifecycle, self.waiting, self.parallel_sampling, self.worker_groups)
        model = ServedModel(settings.names, settings.root, created, settings.model)
        self._make_admission(model)
        self._make_workers(settings)
        self._make_adapter_loads(incarnation, settings.adapters, model)
        self._make_planning(incarnation, settings, policy)

    def _make_queue(self, settings: SchedulerSettings, policy: Policy) -> None:
        limits = QueueLimits(settings.max_queue_len, settings.max_queue_tokens, settings.max_queue_delay_s)
        self.waiting = WaitingQueue(policy)
        self.adapter_waits = AdapterWaits(self.waiting)
        self.wait_estimate = WaitEstimate(self.waiting, self.groups)
        self.bounds = QueueBounds(self.waiting, self.wait_estimate, limits)
        self.parallel_sampling = ParallelSampling(self.waiting)
        self.streams, self.vectors = DetokenizerStreams(self.groups), VectorOutbox()

    def _make_transfers(
        self, incarnation: int, settings: SchedulerSettings, random_bytes: Callable[[int], bytes]
    ) -> None:
        groups, outbox = self.worker_groups, self.outbox
        transfers = TransferSettings(random_bytes, settings.load_failure_policy == "fail")
        self.ledger = TransferLedger(incarnation, settings.kv_lease_s)
        self.audit, self.link_backoff = TransferAudit(self.ledger), LinkBackoff()
        self.handovers = Handovers(
            *(groups, self.waiting, outbox, self.ledger, self.audit, self.link_backoff, transfers),
            self._fail,
        )
        self.notices = TransferNotices(self.handovers, self.ledger, self.audit, self.link_backoff, groups, outbox)

    def _fail(self, sequence: Sequence, detail: str) -> None:
        """The lifecycle drops handovers, and is made after them."""
        self.lifecycle.fail(sequence, detail)

    def _make_admission(self, model: ServedModel) -> None:
        lifecycle, streams, outbox = self.lifecycle, self.streams, self.outbox
        self.model_limits = ModelLimits(model, self.adapters)
        self.gateways = Gateways(lifecycle, streams, outbox)
        self.acceptance = Acceptance(lifecycle, self.waiting, streams, self.bounds, outbox)
        self.requests = RequestHandler(
            *(self.model_limits, self.bounds, self.acceptance, self.gateways, lifecycle),
            *(self.waiting, self.parallel_sampling, self.beams, streams, outbox),
        )

    def _make_workers(self, settings: SchedulerSettings) -> None:
        groups, outbox, waiting, acceptance = self.worker_groups, self.outbox, self.waiting, self.acceptance
        self.quarantine = CrashQuarantine()
        self.router = Router(
            waiting,
            self.groups,
            acceptance,
            self.handovers,
            self.link_backoff,
            self.adapter_waits,
            settings.decode_prefill_tokens,
        )
        self.workers = Workers(groups, self.lifecycle, self.model_limits, self.router, self.notices, outbox)
        self.sleep = WorkerSleep(groups, self.bounds, outbox, self.workers)
        self.controls = Controls(groups, self.sleep, outbox, settings.may_sleep)

    def _make_adapter_loads(self, incarnation: int, settings: AdapterSettings, model: ServedModel) -> None:
        self.adapter_loads = AdapterLoads(
            incarnation,
            model,
            settings,
            self.worker_groups,
            self.adapters,
            self.adapter_waits,
            self.lifecycle,
            self.requests,
            self.model_limits,
            self.outbox,
        )

    def _make_planning(self, incarnation: int, settings: SchedulerSettings, policy: Policy) -> None:
        partial, lifecycle, waiting = settings.partial_prefills, self.lifecycle, self.waiting
        self.delay = PrefillDelay(settings.delay_factor) if settings.delay_factor else None
        self.fair_limiter = FairStepLimiter(policy)
        self.partial_prefills = PartialPrefills(partial, waiting) if partial.max_partial > 1 else None
        limits = PrefillLimits(
            *(self.delay, self.fair_limiter, self.partial_prefills, partial.whole_prompts),
            reserve_whole_prompts=settings.reserve_whole_prompts,
        )
        self.prefills = PrefillPlanner(
            *(lifecycle, waiting, self.parallel_sampling, self.handovers, self.acceptance),
            *(self.router, self.quarantine, self.controls, self.adapter_waits, limits),
        )
        self.planner = StepPlanner(
            *(incarnation, self.prefills, lifecycle, waiting, self.parallel_sampling, self.beams, self.fair_limiter),
            self.groups,
        )
        self.results = ResultApplier(lifecycle, waiting, self.beams, self.vectors)

    @property
    def card(self) -> ModelCard | None:
        """None until a group is attached and the adapters of the start are read; a new object after each change."""
        return self.model_limits.card if self.adapter_loads.is_settled else None

    @property
    def notes(self) -> list[str]:
        """Lines for the start-up report."""
        return [*self.model_limits.notes, *self.adapter_loads.notes]

    @property
    def roles(self) -> frozenset[KVRole]:
        """Returns the roles of the groups in `notes`."""
        return self.model_limits.roles

    @property
    def phase(self) -> str:
        serving = self.adapter_loads.phase or "serving"
        return self.controls.phase or (serving if self.groups else "waiting for a worker")

    @property
    def idle(self) -> bool:
        return not any(group.in_flight for group in self.groups.values())

    # receive

    def on_message(self, peer: int, frame: SchedulerIn, now: float) -> None:
        """Takes one frame. Raises FencedError when this scheduler has been replaced."""
        if isinstance(frame, StepResult):
            self._on_result(peer, frame, now)
            return
        if not isinstance(frame, Generate | Pool | KVLanded | KVSendEnded | KVOpenTransfers) or not self.router.routes:
            self.worker_groups.mark_all_dirty()  # else the router marks the group of a new request
        match frame:
            case Generate() | Pool() | Cancel() | Stop() | PathLost():
                self.requests.on_message(peer, frame, now)
            case Control():
                self._on_control(peer, frame, now)
            case AdapterLoaded():
                self.adapter_loads.on_loaded(peer, frame)
            case Attached():
                self._on_attached(peer, frame, now)
            case Slept():
                self.sleep.on_slept(peer, frame)
            case OutOfStep():
                self.workers.on_out_of_step(peer, frame, now)
            case KVOpenTransfers() | KVLanded() | KVSendEnded():
                self._on_transfer(peer, frame, now)
            case Broken():
                self._on_broken(peer, frame, now)
            case Fenced():
                raise FencedError(f"another scheduler has taken worker {peer:x}: this one ends")

    def _on_transfer(self, worker: int, frame: KVOpenTransfers | KVLanded | KVSendEnded, now: float) -> None:
        if isinstance(frame, KVOpenTransfers):
            self.notices.on_audited(worker, frame, now)
        else:
            self.notices.on_message(worker, frame, now)

    def _on_control(self, gateway: int, frame: Control, now: float) -> None:
        self.gateways.add(gateway)
        if frame.verb in (ControlVerb.LOAD_ADAPTER, ControlVerb.UNLOAD_ADAPTER):
            self.adapter_loads.take(gateway, frame)
        else:
            self.controls.take(gateway, frame, now)

    def on_member(self, member: Member, now: float) -> None:
        """A member joined, or its entry changed."""
        if member.model not in ("", *self._names):
            return
        if member.role is Role.GPU_WORKER and member.ready and not self.sleep.is_asleep(member.incarnation):
            self.workers.on_ready(member.incarnation, now)
        elif member.role is Role.DETOKENIZER and member.ready:
            self.worker_groups.mark_all_dirty()
            self.requests.on_detokenizer(member.incarnation)
        elif member.role is Role.API_GATEWAY:
            self.gateways.add(member.incarnation)

    def on_member_lost(self, incarnation: int) -> None:
        """A member died, or its link broke with frames on it."""
        self.workers.on_lost(incarnation)
        self.adapter_loads.on_lost(incarnation)
        self.controls.on_lost(incarnation)
        self.worker_groups.mark_all_dirty()
        self.requests.on_member_lost(incarnation)

    def _on_attached(self, worker: int, frame: Attached, now: float) -> None:
        group = self.workers.on_attached(worker, frame)
        if group is not None:
            self.requests.on_attached(group.has_kv, now)
            self.adapter_loads.on_attached(worker)
            self.sleep.on_attached(group)

    def _on_broken(self, worker: int, frame: Broken, now: float) -> None:
        if worker in self.groups:
            self.quarantine.blame(self.groups[worker], frame.detail, now, self.lifecycle.fail)
            self.on_member_lost(worker)

    def _on_result(self, worker: int, result: StepResult, now: float) -> None:
        group = self.groups.get(worker)
        if group is None:
            return  # the group was detached after the plan was sent
        record = group.on_answered(result.number)
        if record is None or not record.matches(result):
            log.error(
                "worker %x answered plan %d, which is not what was sent: attaching it again", worker, result.number
            )
            self.workers.attach_again(worker, now)
            return
        self._num_steps += 1
        group.pacer.on_completed(result.step_s, result.launch_s, result.stamp_s, now)
        if worker in self._answered:
            self.streams.end_batches()
        self._answered.add(worker)
        self.worker_groups.mark_dirty((group,))
        if self.delay is not None and record.chunk_sizes:
            self.delay.on_prefill_step(result.step_s)
        self.results.apply(group, record, result, now)

    # admit, build plans, send

    def step(self, now: float) -> list[Outgoing]:
        """Admits, builds plans, and returns the frames to send: plans first, because workers wait for them."""
        if self.quarantine.probations:
            self.quarantine.update()
        if now >= self.notices.check_at:
            self.notices.update(now)
        if self.worker_groups.asked:
            self.workers.repeat_attach(now)
        if now >= self.acceptance.next_expiry_s:
            self.requests.expire(now)
        self._route()
        self._build_plans(now)
        if self.adapters.all:
            self.adapter_loads.step(now)
            if self.adapter_waits.deferred or self.adapter_waits.released:  # places may have been opened or emptied
                self.worker_groups.mark_all_dirty()
                self._route()
                self._build_plans(now)
        if self.controls.open:
            self.controls.answer_done(now)
        return self._take_frames(now)

    def wake_at(self) -> float | None:
        """When to call `step` next if no frame comes."""
        return self.worker_groups.timers.next()

    def _route(self) -> None:
        """With several groups, moves waiting sequences to group queues.

        Those that waited for an adapter are put back into the order only here: groups that put them back while plans
        are built, and pass them over again, could go on for ever.
        """
        if self.adapter_waits.deferred:
            self.adapter_waits.release(self.router.lacking)
        if self.quarantine.probations:  # a quarantined request could wait behind others in the queue of a group
            self.router.requeue_all()
            self.worker_groups.mark_all_dirty()
        elif self.router.routes:
            self.worker_groups.mark_dirty(self.router.route())

    def _build_plans(self, now: float) -> None:
        """For each group to which something happened, as many plans as may be in flight."""
        groups = self.worker_groups
        while (dirty := groups.take_dirty(now)) and not self.controls.frozen:
            while dirty:  # in turn, so that each has the next plan before one has a further one
                dirty = [group for group in dirty if self._send_plan(group, now)]
            if self.router.routes and not self.quarantine.probations:  # preempted sequences may run in another group
                groups.mark_dirty(self.router.route())

    def _send_plan(self, group: WorkerGroup, now: float) -> bool:
        """Whether a plan could be sent: then another one may be possible."""
        if not self.worker_groups.timers.may_send(group.worker, group.pacer, now):
            return False
        plan = self.planner.plan(group, now)
        if plan is None:
            return False
        group.pacer.on_sent(group.in_flight[-1].load, now)
        self.outbox.plan(group.worker, plan)
        return True

    def _take_frames(self, now: float) -> list[Outgoing]:
        bounds, results = self.bounds, self.results
        if now >= self.wait_estimate.next_sample_s:
            self.wait_estimate.sample(now, results.num_output_tokens, results.num_prompt_tokens)
        for text_outbox in self.streams.text_outboxes.values():
            text_outbox.flush(self.outbox)
        self.vectors.flush(self.outbox)
        self._answered.clear()
        if self.waiting.usage.amount.sequences or bounds.was_full or bounds.told_full:
            self.requests.tell_capacity()
        return self.outbox.take()

    def stats(self) -> Stats:
        results, ledger, num_arriving = self.results, self.ledger, self.handovers.num_arriving
        groups, cache_stats, waiting = self.groups.values(), self.worker_groups.cache_stats, self.waiting
        return Stats(
            running=sum(group.num_running for group in groups),
            waiting=len(waiting) + self.parallel_sampling.num_awaiting_prompt + num_arriving,
            requests_total=self.requests.num_requests + self.requests.pools.num_prompts,
            prompt_tokens_total=results.num_prompt_tokens,
            output_tokens_total=results.num_output_tokens,
            preemptions_total=self.lifecycle.num_preemptions,
            blocks_used=sum(group.kv_cache.blocks.num_used for group in groups),
            blocks_total=sum(group.kv_cache.blocks.num_ids for group in groups),
            steps_total=self._num_steps,
            prefix_queries_total=cache_stats.num_queries,
            prefix_hits_total=cache_stats.num_hits,
            host_blocks_used=sum(group.kv_cache.blocks.host.num_used for group in groups),
            host_blocks_total=sum(group.kv_cache.blocks.host.num_ids for group in groups),
            blocks_saved_total=cache_stats.num_saved,
            blocks_fetched_total=cache_stats.num_fetched,
            waiting_tokens=waiting.usage.amount.tokens + waiting.batch_usage.amount.tokens,
            wait_s=self.bounds.wait_s,
            displaced_total=self.prefills.num_displaced,
            refused=[RefusalCount(reason, total) for reason, total in self.requests.num_refused.items()],
            tenants=waiting.policy.largest_tenants(MAX_TENANTS),
            step_sizes=list(results.step_sizes),
            step_tokens_total=results.num_step_tokens,
            arriving=num_arriving,
            transfers_open=len(ledger.transfers),
            transfers_landed_total=ledger.num_landed,
            transfers_aborted_total=ledger.num_aborted,
            blocks_quarantined=ledger.num_quarantined,
            transfer_blocks_failed_total=ledger.num_failed_blocks,
            transfer_notices_dropped_total=ledger.num_dropped,
            transfer_audit_differences_total=self.audit.num_differences,
            second_token_counts=list(results.second_tokens),
            second_token_us_total=round(1e6 * results.second_token_s),
            adapter_use=self.lifecycle.adapter_use(),
        )
