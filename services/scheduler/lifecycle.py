"""The live requests, and every way in which one of their choices leaves the batch or the queue."""

from collections.abc import Callable

from blockyard.services.scheduler.kv_cache.prefix_cache import PrefixCache
from blockyard.services.scheduler.queue.output_lengths import OutputLengths
from blockyard.services.scheduler.queue.policy import Policy
from blockyard.services.scheduler.queue.waiting_queue import WaitingQueue
from blockyard.services.scheduler.sequences.detokenizer_streams import Streams
from blockyard.services.scheduler.sequences.parallel_sampling import Forks
from blockyard.services.scheduler.sequences.requests import Choice, Phase, Request, Seat
from blockyard.services.scheduler.workers.worker_groups import WorkerGroup, WorkerGroups
from blockyard.shared.messages import FinishReason


class Lifecycle:
    def __init__(
        self,
        waiting: WaitingQueue,
        groups: WorkerGroups,
        streams: Streams,
        prefix: PrefixCache,
        policy: Policy,
        forks: Forks,
        lengths: OutputLengths,
    ) -> None:
        self.requests: dict[str, Request] = {}
        self.num_preemptions = 0
        self.preempting: list[Callable[[WorkerGroup], None]] = []  # who wants to look before a seat is taken
        self._waiting, self._groups, self._streams, self._prefix = waiting, groups, streams, prefix
        self._policy, self._forks, self._lengths = policy, forks, lengths

    def end(self, choice: Choice) -> None:
        """The choice is over: results still to come are dropped. Whoever needs to know was told before."""
        request = choice.request
        if request.sink is not None:
            request.sink.num_streams -= 1
        del request.choices[choice.index]
        if choice.outputs and not request.fills_limit:
            most = request.frame.sampling.max_tokens if choice.seat is None else choice.seat.limit - request.num_prompt
            self._lengths.ended(len(choice.outputs), len(choice.outputs) < most)
        self.release(choice)
        if not request.choices:
            del self.requests[request.id]
            if request.search is not None:
                hypotheses, request.search.choices = request.search.choices, []
                for hypothesis in hypotheses:
                    self.release(hypothesis)

    def release(self, choice: Choice) -> None:
        """A choice, or a hypothesis of a beam search, neither runs nor waits any more. It is no member by now."""
        group = self._groups.attached.get(choice.seat.worker) if choice.seat is not None else None
        if choice.phase is Phase.RUNNING and choice.seat is not None:
            left = self._groups.attached[choice.seat.worker]
            self._free(left, choice.seat)
            self._groups.mark_dirty([left])  # what is heard of one group may end a hypothesis in another
        else:
            self._waiting.discard(choice)
        choice.phase = Phase.ENDED
        choice.seat = choice.fork_of = None  # cuts the circle; the collector rarely runs here
        self._forks.left(choice)
        if group is not None:
            self._prefix.drop_private(group, choice)

    def conclude(self, choice: Choice, finish: FinishReason, detail: str = "") -> None:
        """Ends a choice for a reason the worker does not know of."""
        self._streams.conclude(choice, finish, detail)
        self.end(choice)

    def fail(self, choice: Choice, detail: str) -> None:
        """Ends a choice that cannot go on; with a hypothesis of a beam search its whole request."""
        hit = [choice] if choice.request.search is None else list(choice.request.choices.values())
        for one in hit:
            self.conclude(one, FinishReason.FAILED, detail)

    def drop(self, request: Request) -> None:
        """Ends all choices in silence, at the detokenizer too."""
        self._streams.unbind(request)
        for choice in list(request.choices.values()):
            self.end(choice)

    def drop_of_gateway(self, gateway: int) -> None:
        for request in [r for r in self.requests.values() if r.gateway == gateway]:
            self.drop(request)

    def preempt(self, group: WorkerGroup, seat: Seat) -> None:
        """Takes a choice's seat. Once there is room it begins anew, with what is found of it then."""
        for look in self.preempting:
            look(group)
        self._prefix.hash_before_preempt(group, seat)
        self._free(group, seat)
        self.num_preemptions += 1
        self._wait(seat.choice)

    def restart(self, group: WorkerGroup, seat: Seat) -> None:
        """What a seat reads is worth nothing: its choice waits again, and what comes of plans in flight is dropped."""
        for record in group.in_flight:
            record.drop(seat)
        if seat.choice.hypothesis is not None:
            seat.choice.hypothesis.top = None
        if seat in group.running:
            self._free(group, seat)
            self._wait(seat.choice)

    def clear(self, group: WorkerGroup) -> None:
        """A group is lost: its choices wait again, with what is known of them."""
        for choice in group.abandon():
            choice.seat = None
            self._policy.on_freed(choice)
            self._wait(choice)

    def _free(self, group: WorkerGroup, seat: Seat) -> None:
        self._prefix.hash_before_free(group, seat)
        group.free(seat)
        self._policy.on_freed(seat.choice)

    def _wait(self, choice: Choice) -> None:
        choice.phase = Phase.WAITING
        if choice.hypothesis is None or choice.hypothesis.top is None:  # else it only waits for its siblings
            self._waiting.push(choice)
