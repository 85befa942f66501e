"""The session of the attached scheduler: attach, fencing, order of plans, transfers, sleep. Imports no torch."""

import logging
from collections import deque

from blockyard.services.gpu_worker.interfaces import AdapterHost, KVTransfers, SleepModeRunner, WorkerLinks
from blockyard.shared.bus.member_list import Event, Gone, Joined
from blockyard.shared.messages import (
    AdapterLoaded,
    Attach,
    Attached,
    Broken,
    DropAdapter,
    Fenced,
    KVAbort,
    KVAudit,
    KVLanded,
    KVOpenTransfers,
    KVReceive,
    KVSendEnded,
    LoadAdapter,
    OutOfStep,
    Sleep,
    Slept,
    StepPlan,
    Wake,
    WorkerIn,
)

log = logging.getLogger(__name__)


class SchedulerSession:
    """Accepts plans from the scheduler that attached last. Plans wait in `plans` until they are launched."""

    def __init__(self, links: WorkerLinks, runner: SleepModeRunner, transfers: KVTransfers | None = None) -> None:
        """transfers: of KV blocks; None: this worker exchanges blocks with no other."""
        self._links, self._runner, self._transfers = links, runner, transfers
        self.plans: deque[StepPlan] = deque()
        self._drops: list[int] = []  # adapters that are not used any more
        self._scheduler: int | None = None
        self._next = 0  # number of the next plan; 0: none is accepted before the next Attach

    def expects_result(self, plan: StepPlan) -> bool:
        """Returns whether the scheduler of the plan is still attached and waits for the result."""
        return self._next > 0 and plan.scheduler == self._scheduler

    def handle(self, peer: int, event: "Event | WorkerIn") -> None:
        match event:
            case Attach():
                self._attach(peer, event)
            case StepPlan():
                self._take(peer, event)
            case Sleep():
                self._sleep(peer, event)
            case Wake():
                self._wake(peer, event)
            case KVReceive() | KVAbort() | KVAudit():
                self._take_transfer(peer, event)
            case LoadAdapter() | DropAdapter():
                self._take_adapter(peer, event)
            case Gone() if peer == self._scheduler:
                self.plans.clear()  # KV and slots are kept for the next Attach
                self._next = 0
            case Joined() if (
                peer == self._scheduler and self._next == 0
            ):  # it only lost its link, and waits for results
                self._links.answer(peer, OutOfStep(1))
            case Gone() if self._transfers is not None:
                self._transfers.on_gone(peer)

    def answer_transfers(self, frames: list[KVLanded | KVSendEnded]) -> None:
        """Answers also for transfers of an earlier scheduler, which an attached one has heard of. Without an attached
        scheduler there is no answer: the next one hears which transfers are open."""
        if self._scheduler is not None:
            for frame in frames:
                self._links.answer(self._scheduler, frame)

    def is_loading_adapters(self, *, is_idle: bool = False) -> bool:
        """Answers for the adapters that were read since the last call. Returns whether more will be.

        is_idle: no step is in flight, or waits.
        """
        adapters = self._runner.adapters
        if adapters is None:
            return False
        if self._drops:
            self._drop_adapters(adapters)
        if not adapters.is_loading:
            return False
        for done in adapters.poll(is_idle=is_idle):
            if self._scheduler is not None and self._next > 0:
                loaded = AdapterLoaded(
                    done.adapter,
                    done.digest,
                    done.size_bytes,
                    done.error,
                    done.notes,
                    done.num_virtual_tokens,
                    done.max_len,
                    done.num_added_tokens,
                    done.has_tokenizer,
                    done.added_tokens,
                    done.status,
                )
                self._links.answer(self._scheduler, loaded)
        return adapters.is_loading

    def report_broken(self, detail: str) -> None:
        """Tells the scheduler that the device failed and no results will follow."""
        if self._scheduler is not None and self._next > 0:
            self._links.answer(self._scheduler, Broken(detail))

    def _attach(self, peer: int, attach: Attach) -> None:
        if self._scheduler not in (None, attach.scheduler):  # its plans are dropped, so it must not wait for results
            self._links.answer(self._scheduler, Fenced())
        self.plans.clear()
        self._runner.reset(attach.num_slots)
        if attach.forget:
            self._runner.reset_prefix_cache()
        if self._runner.adapters is not None:
            self._runner.adapters.reset()
            self._drops.clear()
        self._scheduler, self._next = attach.scheduler, 1
        block_ids, names = self._runner.block_hashes.blocks_and_hashes()
        geometry, still_open = self._runner.geometry, dict[int, list[int]]()
        host = self._runner.block_hashes.host_blocks_and_hashes()
        if self._transfers is not None:
            self._transfers.open()
            geometry, still_open = self._transfers.describe(geometry), self._transfers.open_transfers()
        transfers = list(still_open), list(still_open.values())
        attached = Attached(attach.scheduler, geometry, block_ids, names, *host, *transfers, attach.number)
        self._links.answer(peer, attached)
        log.info("attached to scheduler %x with %d slots", attach.scheduler, attach.num_slots)

    def _sleep(self, peer: int, frame: Sleep) -> None:
        """Sleeps until the next Attach. Refuses all schedulers but the attached one."""
        if frame.scheduler != self._scheduler:
            self._links.answer(peer, Fenced())
            return
        self.plans.clear()
        self._next = 0
        if self._transfers is not None:
            self._transfers.close()
        freed = self._runner.sleep(frame.level)
        self._links.answer(peer, Slept(freed))

    def _wake(self, peer: int, frame: Wake) -> None:
        """Restores a part of the memory. The worker stays asleep."""
        if frame.scheduler != self._scheduler:
            self._links.answer(peer, Fenced())
            return
        freed = self._runner.wake(frame.tags)
        self._links.answer(peer, Slept(freed))

    def _take_adapter(self, peer: int, frame: LoadAdapter | DropAdapter) -> None:
        if frame.scheduler != self._scheduler:
            self._links.answer(peer, Fenced())
        elif self._next == 0:
            return  # OutOfStep was sent: the next Attach begins without adapters
        elif self._runner.adapters is None:
            if isinstance(frame, LoadAdapter):
                self._links.answer(peer, AdapterLoaded(frame.adapter, error="this worker serves no adapters"))
        elif isinstance(frame, LoadAdapter):
            self._drops = [one for one in self._drops if one != frame.adapter]  # a plan in the queue still places it
            self._runner.adapters.load(frame.adapter, frame.path, is_prompt=frame.is_prompt)
        else:
            self._drops.append(frame.adapter)

    def _drop_adapters(self, adapters: AdapterHost) -> None:
        """Drops adapters that no plan in the queue places, or starts a sequence with."""
        placed = {one.adapter for plan in self.plans for one in plan.adapters}
        placed |= {one.prompt_adapter for plan in self.plans for one in plan.starts if one.prompt_adapter is not None}
        for adapter in [one for one in self._drops if one not in placed]:
            self._drops.remove(adapter)
            adapters.drop(adapter)

    def _take_transfer(self, peer: int, frame: KVReceive | KVAbort | KVAudit) -> None:
        if peer != self._scheduler:
            self._links.answer(peer, Fenced())
        elif self._transfers is None:
            self._deny_transfer(peer, frame)
        elif isinstance(frame, KVAudit):
            self.answer_transfers(self._transfers.poll())  # first: transfers that are not in the list have ended
            still_open = self._transfers.open_transfers()
            answer = KVOpenTransfers(frame.number, list(still_open), list(still_open.values()))
            self._links.answer(peer, answer)
        elif isinstance(frame, KVAbort):
            self._transfers.abort(frame)
        elif self._next > 0:  # otherwise it was sent before OutOfStep arrived
            self._transfers.receive(frame)

    def _deny_transfer(self, peer: int, frame: KVReceive | KVAbort | KVAudit) -> None:
        """No transfer is open here. The scheduler keeps blocks in quarantine until that is said."""
        match frame:
            case KVReceive():
                log.error("KVReceive came to a worker without KV transfers")
                self._links.answer(peer, KVLanded(frame.transfer, [], [], True))
            case KVAbort(number, is_source):
                ended = KVSendEnded(number, False) if is_source else KVLanded(number, [], [], True)
                self._links.answer(peer, ended)
            case KVAudit():
                self._links.answer(peer, KVOpenTransfers(frame.number))

    def _take(self, peer: int, plan: StepPlan) -> None:
        if plan.scheduler != self._scheduler:
            log.warning("refused a plan of scheduler %x", plan.scheduler)
            self._links.answer(peer, Fenced())
        elif self._next == 0:
            return  # OutOfStep was sent: ignores plans that were sent before it arrived
        elif plan.number != self._next:
            log.error("plan %d came where %d was due: slots dropped", plan.number, self._next)
            self._links.answer(peer, OutOfStep(self._next))
            self.plans.clear()
            self._runner.reset(0)
            self._next = 0
        else:
            self._next += 1
            self.plans.append(plan)
