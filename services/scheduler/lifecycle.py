"""The live requests, and every way in which one of their choices leaves the batch or the queue."""

from collections.abc import Callable

from blockyard.services.scheduler.queue.waiting_queue import WaitingQueue
from blockyard.services.scheduler.sequences.detokenizer_streams import DetokenizerStreams
from blockyard.services.scheduler.sequences.parallel_sampling import ParallelSampling
from blockyard.services.scheduler.sequences.requests import Phase, Request, RunningSequence, Sequence
from blockyard.services.scheduler.workers.worker_groups import WorkerGroup, WorkerGroups
from blockyard.shared.messages import FinishReason


class Lifecycle:
    def __init__(
        self,
        waiting: WaitingQueue,
        groups: WorkerGroups,
        streams: DetokenizerStreams,
        parallel_sampling: ParallelSampling,
    ) -> None:
        self.requests: dict[str, Request] = {}
        self.num_preemptions = 0
        self.before_preempt: list[Callable[[WorkerGroup], None]] = []  # who wants to look before a seat is taken
        self._waiting, self._groups, self._streams = waiting, groups, streams
        self._parallel_sampling = parallel_sampling

    def add(self, request: Request) -> None:
        self.requests[request.id] = request

    def end(self, sequence: Sequence) -> None:
        """The choice is over: results still to come are dropped. Whoever needs to know was told before."""
        request = sequence.request
        if request.text_outbox is not None:
            request.text_outbox.num_streams -= 1
        del request.sequences[sequence.index]
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
            if request.search is not None:
                hypotheses, request.search.beam_scheduler = request.search.beam_scheduler, []
                for hypothesis in hypotheses:
                    self.release(hypothesis)

    def release(self, sequence: Sequence) -> None:
        """A choice, or a hypothesis of a beam search, neither runs nor waits any more. It is no member by now."""
        group = self._groups.attached.get(sequence.last_run.worker) if sequence.last_run is not None else None
        if sequence.phase is Phase.RUNNING and sequence.last_run is not None:
            left = self._groups.attached[sequence.last_run.worker]
            self._free(left, sequence.last_run)
            self._groups.mark_dirty([left])  # what is heard of one group may end a hypothesis in another
        else:
            self._waiting.discard(sequence)
        sequence.phase = Phase.ENDED
        sequence.last_run = sequence.prompt_source = None  # cuts the circle; the collector rarely runs here
        self._parallel_sampling.on_removed(sequence)
        if group is not None:
            group.kv_cache.drop_private(sequence)

    def finish(self, sequence: Sequence, finish: FinishReason, detail: str = "") -> None:
        """Ends a choice for a reason the worker does not know of."""
        self._streams.finish(sequence, finish, detail)
        self.end(sequence)

    def fail(self, sequence: Sequence, detail: str) -> None:
        """Ends a choice that cannot go on; with a hypothesis of a beam search its whole request."""
        hit = [sequence] if sequence.request.search is None else list(sequence.request.sequences.values())
        for one in hit:
            self.finish(one, FinishReason.FAILED, detail)

    def drop(self, request: Request) -> None:
        """Ends all choices in silence, at the detokenizer too."""
        self._streams.close(request)
        for sequence in list(request.sequences.values()):
            self.end(sequence)

    def drop_gateway(self, gateway: int) -> None:
        for request in [r for r in self.requests.values() if r.gateway == gateway]:
            self.drop(request)

    def preempt(self, group: WorkerGroup, running: RunningSequence) -> None:
        """Takes a choice's seat. Once there is room it begins anew, with what is found of it then."""
        for look in self.before_preempt:
            look(group)
        group.kv_cache.hash_before_preempt(running)
        self._free(group, running)
        self.num_preemptions += 1
        self._wait(running.sequence)

    def reschedule(self, group: WorkerGroup, running: RunningSequence) -> None:
        """What a seat reads is worth nothing: its choice waits again, and what comes of plans in flight is dropped."""
        for record in group.in_flight:
            record.drop(running)
        if running.sequence.hypothesis is not None:
            running.sequence.hypothesis.top = None
        if running in group.running:
            self._free(group, running)
            self._wait(running.sequence)

    def requeue_all(self, group: WorkerGroup) -> None:
        """A group is lost: its choices wait again, with what is known of them."""
        for sequence in group.abandon():
            sequence.last_run = None
            self._waiting.policy.on_freed(sequence)
            self._wait(sequence)

    def _free(self, group: WorkerGroup, running: RunningSequence) -> None:
        group.free(running)
        self._waiting.policy.on_freed(running.sequence)

    def _wait(self, sequence: Sequence) -> None:
        sequence.phase = Phase.WAITING
        if sequence.hypothesis is None or sequence.hypothesis.top is None:  # else it only waits for its siblings
            self._waiting.push(sequence)
