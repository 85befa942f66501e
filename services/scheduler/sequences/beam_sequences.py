"""Beam search in the batch: each live hypothesis is a choice of its own, computed like any other.

A hypothesis computes the tokens it has and is then left out of plans until its siblings have done so too: which of
them go on, and with which tokens, is decided from all their results. Of those that extend the same hypothesis the
first stays in its seat; the others fork from there, so that all share what they have in common. A hypothesis that is
preempted, or whose worker is lost, waits for a seat with its tokens like any other choice.

Nothing is said of a search before it is over.
"""

from blockyard.services.scheduler.lifecycle import Lifecycle
from blockyard.services.scheduler.queue.waiting_queue import WaitingQueue
from blockyard.services.scheduler.sequences.beam_search import BeamSearch, Finished, Hypothesis
from blockyard.services.scheduler.sequences.parallel_sampling import Forks
from blockyard.services.scheduler.sequences.requests import Choice, Phase, Request, Search, make_choice
from blockyard.services.scheduler.workers.worker_groups import WorkerGroup, WorkerGroups
from blockyard.shared.messages import Beam, SlotResult, TokenStep


class Beams:
    """All live searches. `Request.search` says of which choices one consists."""

    def __init__(self, waiting: WaitingQueue, groups: WorkerGroups, lifecycle: Lifecycle, forks: Forks) -> None:
        self.forks = forks
        self._waiting, self._groups, self._lifecycle = waiting, groups, lifecycle
        self._live: dict[str, Request] = {}  # and some that have ended since

    def begin(self, request: Request, beam: Beam) -> None:
        """The request's own choices are what it will be answered with."""
        first = make_choice(request, 0, b"")
        first.hypothesis = Hypothesis(first.outputs)
        first.width = beam.width
        request.search = Search(BeamSearch(beam, request.frame.sampling), [first])
        self._live[request.id] = request
        self.forks.add(request, [first])

    def take(self, group: WorkerGroup, choice: Choice, slot: SlotResult) -> None:
        """What a slot produced for a hypothesis."""
        request, search, hypothesis = choice.request, choice.request.search, choice.hypothesis
        assert search is not None
        assert hypothesis is not None
        if slot.detail:
            self._lifecycle.fail(choice, slot.detail)
            return
        if not slot.logprobs:
            return  # of a part of its prompt, or of nothing
        hypothesis.top = slot.logprobs[0]
        self._waiting.discard(choice)  # if it was preempted since, it needs no seat any more
        self.forks.left(choice)
        live = [c.hypothesis for c in search.choices if c.hypothesis is not None]
        if any(h.top is None for h in live):
            near = {c.seat.worker for c in search.choices if c.seat is not None and c.phase is Phase.RUNNING}
            self._groups.mark_dirty(self._groups.attached[worker] for worker in near)  # one may have to give way there
            return
        search.num_cached = max(search.num_cached, choice.num_cached or 0)
        search.queued_s = choice.queued_s if search.queued_s is None else search.queued_s
        search.steps.shorten(group.max_model_len - request.num_prompt)
        extensions = search.steps.step(live, group.geometry.eos_token_ids)
        if extensions:
            self._extend(search, extensions)
        else:
            self._answer(request, search)

    def relieve(self, group: WorkerGroup) -> bool:
        """Takes the seats of searches that hold some and cannot go on. Returns whether there were any.

        Somebody has to give way where one of a search's hypotheses waits for what others hold that wait for it.
        """
        relieved = False
        for request in list(self._live.values()):
            search = request.search
            if search is None or not request.choices:
                del self._live[request.id]
                continue
            idle = [c.seat for c in search.choices if _is_idle(c) and c.seat is not None and c.seat in group.running]
            if not idle or any(choice.awaits_results() for choice in search.choices):
                search.stalled.pop(group.worker, None)
                continue
            since = search.stalled.setdefault(group.worker, group.plan_clock.last_sent)
            if group.in_flight and group.plan_clock.last_sent - since <= group.depth:
                continue  # what is missing may only rest
            for seat in idle:
                self._lifecycle.preempt(group, seat)
            relieved = True
        return relieved

    def _extend(self, search: Search, extensions: list[tuple[int, Hypothesis]]) -> None:
        """The hypotheses that go on take the place of those that there were."""
        before = search.choices
        stay: dict[int, Hypothesis] = {}
        for place, hypothesis in extensions:
            if before[place].phase is Phase.RUNNING:
                stay.setdefault(place, hypothesis)
        left = [choice for place, choice in enumerate(before) if place not in stay]
        indexes = iter([choice.index for choice in left] + list(range(len(before), search.steps.width)))
        search.choices = [
            before[place] if stay.get(place) is hypothesis else _fork(next(indexes), before[place], hypothesis)
            for place, hypothesis in extensions
        ]
        for choice in left:
            self._lifecycle.release(choice)
        for place, hypothesis in stay.items():
            self._go_on(before[place], hypothesis)
        self.forks.add(before[0].request, [choice for choice in search.choices if choice not in before])

    def _go_on(self, choice: Choice, hypothesis: Hypothesis) -> None:
        """A hypothesis in its parent's seat. Its worker has the next token already if that is the one it drew."""
        before, seat = choice.hypothesis, choice.seat
        assert seat is not None
        group = self._groups.attached[seat.worker]
        self._groups.mark_dirty([group])
        if before is None or before.top is None or hypothesis.outputs[-1] != before.top.token_id:
            group.restarts.append(seat)
        choice.hypothesis, choice.outputs = hypothesis, hypothesis.outputs
        choice.fork_of = None  # that one goes its own way now
        seat.ceiling = choice.known

    def _answer(self, request: Request, search: Search) -> None:
        """The search is over: each of the request's choices is one of the best, by its index."""
        found = search.steps.finished
        for choice in sorted(request.choices.values(), key=lambda c: c.index):
            if choice.index >= len(found):
                self._lifecycle.fail(choice, f"beam search found {len(found)} sequences, no more")
                return
            if request.sink is not None:
                request.sink.steps.append(_step(choice, found[choice.index], search))
            self._lifecycle.end(choice)


def _is_idle(choice: Choice) -> bool:
    """It has a seat and nothing to do there before its siblings are as far."""
    return choice.phase is Phase.RUNNING and choice.hypothesis is not None and choice.hypothesis.top is not None


def _fork(index: int, parent: Choice, hypothesis: Hypothesis) -> Choice:
    """One that goes on from what its parent has computed, if that is still there when it gets a seat."""
    return Choice(
        parent.request,
        index,
        hypothesis.outputs,
        block_hashes=list(parent.block_hashes),
        hash_block_size=parent.hash_block_size,
        num_cached=parent.num_cached or 0,
        hypothesis=hypothesis,
        fork_of=parent.seat if parent.phase is Phase.RUNNING else None,
    )


def _step(choice: Choice, found: Finished, search: Search) -> TokenStep:
    request, best = choice.request, found.hypothesis
    return TokenStep(
        request.id,
        request.attempt,
        choice.index,
        0,
        best.outputs.tolist(),
        found.finish,
        found.stop_token,
        logprobs=best.entries,
        cached_tokens=search.num_cached if choice.index == 0 else 0,
        queued_s=search.queued_s,
    )
