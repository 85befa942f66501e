"""The live requests, and every way in which one of their sequences leaves the batch or the queue."""

from collections.abc import Callable

from blockyard.services.scheduler.adapters.registry import AdapterRegistry
from blockyard.services.scheduler.batch.worker_groups import WorkerGroup, WorkerGroups
from blockyard.services.scheduler.lifecycle.detokenizer_streams import DetokenizerStreams
from blockyard.services.scheduler.lifecycle.parallel_sampling import ParallelSampling
from blockyard.services.scheduler.outbox import VectorOutbox
from blockyard.services.scheduler.queue.waiting_queue import WaitingQueue
from blockyard.services.scheduler.sequences.pooled_requests import PooledRequest
from blockyard.services.scheduler.sequences.requests import Phase, Request, RunningSequence, Sequence
from blockyard.services.scheduler.transfers.handovers import Handovers
from blockyard.shared.messages import AdapterUse, FinishReason


class Lifecycle:
    """Owns the live requests. What waits, and the text streams, have owners of their own, which it tells."""

    def __init__(
        self,
        groups: WorkerGroups,
        waiting: WaitingQueue,
        parallel_sampling: ParallelSampling,
        handovers: Handovers,
        streams: DetokenizerStreams,
        vectors: VectorOutbox,
        adapters: AdapterRegistry,
    ) -> None:
        self.requests: dict[str, Request] = {}
        self.pools: dict[str, PooledRequest] = {}  # their prompts are among `requests`
        self.num_preemptions = 0
        self.before_preempt: list[Callable[[WorkerGroup], None]] = []  # called before each preemption
        self._groups, self._waiting, self._policy = groups, waiting, waiting.policy
        self._parallel_sampling, self._handovers = parallel_sampling, handovers
        self._streams, self._vectors, self._adapters = streams, vectors, adapters

    def add(self, request: Request) -> None:
        self.requests[request.id] = request
        for adapter in request.adapters:
            self._adapters.use(adapter, request.id)

    def adapter_use(self) -> AdapterUse | None:
        """The LoRA adapters of live requests; None if no worker serves any."""
        places = [group.adapters.num_places for group in self._groups.attached.values() if group.adapters.serves_any]
        if not places:
            return None
        running, waiting = dict[str, None](), dict[str, None]()  # of some bytes and of others there may be one name
        for adapter in self._adapters.all.values():
            if adapter.is_prompt:
                continue
            live = [self.requests[one] for one in adapter.requests]
            phases = {sequence.phase for request in live for sequence in request.active_sequences}
            if Phase.RUNNING in phases:
                running[adapter.name] = None
            if phases - {Phase.RUNNING}:
                waiting[adapter.name] = None
        return AdapterUse(min(places), list(running), list(waiting))

    def end(self, sequence: Sequence) -> None:
        """Ends a sequence after its last tokens have been sent. Results in flight are ignored."""
        request = sequence.request
        request.remove_sequence(sequence)
        if sequence.outputs and not request.has_fixed_length:
            most = (
                request.frame.sampling.max_tokens
                if sequence.last_run is None
                else sequence.last_run.max_num_tokens - request.num_prompt
            )
            self._waiting.output_lengths.ended(len(sequence.outputs), len(sequence.outputs) < most)
        self.release(sequence)
        if not request.sequences:
            del self.requests[request.id]
            if request.pool is not None:
                request.pool.on_ended(sequence.index)
                if not self.pools[request.pool.id].requests:
                    del self.pools[request.pool.id]
            for adapter in request.adapters:
                self._adapters.on_request_ended(request.id, adapter)
            if request.search is not None:
                for beam in request.search.replace_beams([]):
                    self.release(beam)

    def release(self, sequence: Sequence) -> None:
        """Takes a sequence out of the batch or the queue. The caller has removed it from its request or search."""
        group = self._groups.attached.get(sequence.last_run.worker) if sequence.last_run is not None else None
        if sequence.phase is Phase.RUNNING and sequence.last_run is not None:
            left = self._groups.attached[sequence.last_run.worker]
            self._free(left, sequence.last_run)
            self._groups.mark_dirty([left])  # a result of one group may end a beam in another
        else:
            self._waiting.discard(sequence)
            if sequence.phase is Phase.ARRIVING:
                self.pass_on(sequence)
            self.drop_handover(sequence)
        sequence.on_ended()
        self._parallel_sampling.on_removed(sequence)
        if group is not None:
            group.kv_cache.drop_private(sequence)

    def pass_on(self, sequence: Sequence) -> None:
        """A sequence ends whose prompt is computed. If another one waits for that, it gets the blocks."""
        heir = self._parallel_sampling.take_next(sequence.request) if sequence.handover is not None else None
        if heir is not None:
            heir.share_prefilled(sequence)
            self._handovers.pass_on(sequence, heir)

    def finish(self, sequence: Sequence, finish: FinishReason, detail: str = "", status: int = 500) -> None:
        """Ends a sequence for a reason that does not come from the worker."""
        request = sequence.request
        if request.has_text:
            self._streams.finish(sequence, finish, detail, status)
        elif request.pool is not None:
            self._vectors.fail(self.pools[request.pool.id], sequence.index, detail, status)
        self.end(sequence)

    def fail(self, sequence: Sequence, detail: str, status: int = 500) -> None:
        """Ends a sequence that cannot continue; for a beam, all choices of its request."""
        failed = [sequence] if sequence.request.search is None else list(sequence.request.sequences.values())
        for one in failed:
            self.finish(one, FinishReason.FAILED, detail, status)

    def drop(self, request: Request) -> None:
        """Ends all sequences of a request without an answer, at the detokenizer too."""
        self._streams.close(request)
        for sequence in list(request.sequences.values()):
            self.end(sequence)

    def drop_gateway(self, gateway: int) -> None:
        for request in [r for r in self.requests.values() if r.gateway == gateway]:
            self.drop(request)

    def preempt(self, group: WorkerGroup, running: RunningSequence) -> None:
        """Frees the slot and blocks of a sequence. It waits, and starts again with what the prefix cache then has."""
        for hook in self.before_preempt:
            hook(group)
        group.kv_cache.hash_before_preempt(running)
        self._free(group, running)
        self.num_preemptions += 1
        running.sequence.on_waiting()
        self._queue(running.sequence)

    def hand_over(self, group: WorkerGroup, running: RunningSequence, now: float | None) -> None:
        """A sequence has its first token: it leaves the batch, and goes on in another group."""
        group.free(running)
        self._policy.on_freed(running.sequence)
        self._handovers.on_prefilled(running.sequence, now)

    def drop_handover(self, sequence: Sequence) -> None:
        """If a sequence was to go on in another group, it no longer is."""
        if sequence.handover is not None:
            self._handovers.drop(sequence)

    def reschedule(self, group: WorkerGroup, running: RunningSequence) -> None:
        """Restarts a sequence after its blocks were invalidated. Results in flight are ignored."""
        for record in group.in_flight:
            record.drop(running)
        if running.sequence.hypothesis is not None:
            running.sequence.hypothesis.top = None  # its last token is computed again
        if running in group.running:
            self._free(group, running)
            running.sequence.on_waiting()
            self._queue(running.sequence)

    def requeue_all(self, group: WorkerGroup) -> None:
        """A group is lost: its sequences wait again, with the tokens that they have."""
        for sequence in group.abandon():
            self.drop_handover(sequence)
            sequence.on_waiting(is_lost=True)
            self._policy.on_freed(sequence)
            self._queue(sequence)
        for run in group.packed_in_flight():
            self._policy.on_freed(run.sequence)
            if run.sequence.phase is not Phase.ENDED and run.sequence.request.texts is not None:
                run.sequence.request.texts.put_back(run.texts)
                self._waiting.put_back_texts(run.sequence, run.amount)

    def _free(self, group: WorkerGroup, running: RunningSequence) -> None:
        group.free(running)
        self._policy.on_freed(running.sequence)
        self.drop_handover(running.sequence)

    def _queue(self, sequence: Sequence) -> None:
        if sequence.hypothesis is None or sequence.hypothesis.top is None:  # else it only waits for the other beams
            self._waiting.push(sequence)
