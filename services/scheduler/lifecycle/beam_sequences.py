"""Runs beam search: each live hypothesis, a beam, is a sequence of its own in the running batch.

A beam computes its tokens and is then left out of plans until all beams of its search have done so, because the next
hypotheses follow from all their results. Of the beams that extend the same hypothesis, the first stays in its slot; the
others share its blocks. A beam that is preempted, or loses its worker, waits like any other sequence.

The client gets no tokens before the search is over.
"""

from blockyard.services.scheduler.batch.worker_groups import WorkerGroup, WorkerGroups
from blockyard.services.scheduler.lifecycle.lifecycle import Lifecycle
from blockyard.services.scheduler.lifecycle.parallel_sampling import ParallelSampling
from blockyard.services.scheduler.queue.waiting_queue import WaitingQueue
from blockyard.services.scheduler.sequences.beam_search import BeamSearch, Finished, Hypothesis
from blockyard.services.scheduler.sequences.requests import ActiveBeamSearch, Phase, Request, Sequence, make_sequence
from blockyard.shared.messages import Beam, SlotResult, TokenStep
from blockyard.shared.token_ids import num_ids


class BeamScheduler:
    """All searches in progress. The state of each is in its `Request.search`."""

    def __init__(
        self, lifecycle: Lifecycle, waiting: WaitingQueue, parallel_sampling: ParallelSampling, groups: WorkerGroups
    ) -> None:
        self._lifecycle, self._waiting, self._groups = lifecycle, waiting, groups
        self._parallel_sampling = parallel_sampling
        self.live: dict[str, Request] = {}  # ended ones are removed in `preempt_stalled`

    def begin(self, request: Request, beam: Beam) -> None:
        """Starts a search with one beam. The sequences of the request are only its answer."""
        first = make_sequence(request, 0, b"")
        first.set_hypothesis(Hypothesis(first.outputs))
        first.num_beams = beam.width
        search = BeamSearch(beam, request.frame.sampling, num_ids(request.frame.prompt_ids))
        request.search = ActiveBeamSearch(search, [first])
        self.live[request.id] = request
        self._parallel_sampling.add(request, [first])

    def on_result(self, group: WorkerGroup, sequence: Sequence, slot: SlotResult) -> None:
        request, search, hypothesis = sequence.request, sequence.request.search, sequence.hypothesis
        assert search is not None
        assert hypothesis is not None
        if slot.detail:
            self._lifecycle.fail(sequence, slot.detail, slot.status)
            return
        if not slot.logprobs:
            return  # the result of a part of its prompt, or an empty one
        hypothesis.top = slot.logprobs[0]
        self._waiting.discard(sequence)  # if it was preempted, it needs to run no more
        self._parallel_sampling.on_removed(sequence)
        live = [c.hypothesis for c in search.beams if c.hypothesis is not None]
        if any(h.top is None for h in live):
            return
        search.on_step(sequence)
        search.steps.shorten(group.max_model_len - request.num_prompt)
        extensions = search.steps.step(live, group.geometry.eos_token_ids)
        if extensions:
            self._extend(search, extensions)
        else:
            self._answer(request, search)

    def on_plan_completed(self, group: WorkerGroup) -> None:
        """Marks groups in which `preempt_stalled` may find beams to preempt: their search awaits no result any more.

        This need not follow a beam's result: a beam has none if its blocks could not be fetched, and waits again,
        perhaps for another group to which nothing happens.
        """
        if len(self._groups.attached) < 2:
            return  # this group is marked
        for request in self.live.values():
            beams = request.search.beams if request.search is not None else []
            ran_here = any(beam.last_run is not None and beam.last_run.worker == group.worker for beam in beams)
            if ran_here and not any(beam.awaits_results() for beam in beams):
                runs = [beam.last_run for beam in beams if beam.phase is Phase.RUNNING]
                near = {running.worker for running in runs if running is not None}
                self._groups.mark_dirty(self._groups.attached[worker] for worker in near)

    def preempt_stalled(self, group: WorkerGroup) -> bool:
        """Preempts idle beams of searches that cannot continue. Returns whether there were any.

        A beam may wait for the blocks of other beams, which are idle until it has run.
        """
        relieved = False
        for request in list(self.live.values()):
            search = request.search
            if search is None or not request.sequences:
                del self.live[request.id]
                continue
            idle = [
                c.last_run
                for c in search.beams
                if _is_idle(c) and c.last_run is not None and c.last_run in group.running
            ]
            if not idle or any(sequence.awaits_results() for sequence in search.beams):
                search.stalled.pop(group.worker, None)
                continue
            since = search.stalled.setdefault(group.worker, group.plan_clock.last_sent)
            if group.in_flight and group.plan_clock.last_sent - since <= group.depth:
                continue  # the blocks it lacks may become free with plans in flight
            for running in idle:
                self._lifecycle.preempt(group, running)
            relieved = True
        return relieved

    def _extend(self, search: ActiveBeamSearch, extensions: list[tuple[int, Hypothesis]]) -> None:
        before = search.beams
        stay: dict[int, Hypothesis] = {}
        for place, hypothesis in extensions:
            if before[place].phase is Phase.RUNNING:
                stay.setdefault(place, hypothesis)
        left = [sequence for place, sequence in enumerate(before) if place not in stay]
        indexes = iter([sequence.index for sequence in left] + list(range(len(before), search.steps.width)))
        search.replace_beams(
            [
                before[place] if stay.get(place) is hypothesis else _fork(next(indexes), before[place], hypothesis)
                for place, hypothesis in extensions
            ]
        )
        for sequence in left:
            self._lifecycle.release(sequence)
        for place, hypothesis in stay.items():
            self._go_on(before[place], hypothesis)
        self._parallel_sampling.add(
            before[0].request, [sequence for sequence in search.beams if sequence not in before]
        )

    def _go_on(self, sequence: Sequence, hypothesis: Hypothesis) -> None:
        """A beam stays in its slot, or is handed over to another group.

        It restarts in its slot if its next token differs from what the worker sampled.
        """
        before, running = sequence.hypothesis, sequence.last_run
        assert running is not None
        group = self._groups.attached[running.worker]
        self._groups.mark_dirty([group])
        if running.leaves_prefilled:
            sequence.set_hypothesis(hypothesis)
            self._lifecycle.hand_over(group, running, None)  # its tokens are told at the end
            return
        if before is None or before.top is None or hypothesis.outputs[-1] != before.top.token_id:
            group.restart_sequence(running)
        sequence.set_hypothesis(hypothesis)
        running.max_scheduled_tokens = sequence.num_tokens

    def _answer(self, request: Request, search: ActiveBeamSearch) -> None:
        """Ends the search. The n-th best hypothesis is the answer for choice n."""
        found = search.steps.finished
        for sequence in sorted(request.sequences.values(), key=lambda c: c.index):
            if sequence.index >= len(found):
                self._lifecycle.fail(sequence, f"beam search found {len(found)} sequences, no more")
                return
            if request.text_outbox is not None:
                request.text_outbox.add_step(_step(sequence, found[sequence.index], search))
            self._lifecycle.end(sequence)


def _is_idle(sequence: Sequence) -> bool:
    """Whether it runs and has nothing to compute before the other beams have done so."""
    return sequence.phase is Phase.RUNNING and sequence.hypothesis is not None and sequence.hypothesis.top is not None


def _fork(index: int, parent: Sequence, hypothesis: Hypothesis) -> Sequence:
    """A beam that shares the blocks of its parent, if the parent still has them when the beam starts."""
    running = parent.last_run if parent.phase is Phase.RUNNING else None
    leaves = running is not None and running.leaves_prefilled
    return Sequence(
        parent.request,
        index,
        hypothesis.outputs,
        block_hashes=list(parent.block_hashes),
        hash_block_size=parent.hash_block_size,
        num_cached_tokens=parent.num_cached_tokens or 0,
        hypothesis=hypothesis,
        prompt_source=None if leaves else running,
        was_prefilled=leaves or parent.was_prefilled,
    )


def _step(sequence: Sequence, found: Finished, search: ActiveBeamSearch) -> TokenStep:
    request, best = sequence.request, found.hypothesis
    return TokenStep(
        request.id,
        request.attempt,
        sequence.index,
        0,
        best.outputs.tolist(),
        found.finish,
        found.stop_token,
        logprobs=best.entries,
        cached_tokens=request.reported(search.num_cached_tokens) if sequence.index == 0 else 0,
        queued_s=search.queued_s,
    )
