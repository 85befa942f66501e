"""Sends the results of packed steps to gateways: each request's part of the worker's block of bytes, as it came."""

from array import array
from collections.abc import Sequence as ReadOnly

from blockyard.services.scheduler.batch.plan_builder import PackedRun
from blockyard.services.scheduler.lifecycle.lifecycle import Lifecycle
from blockyard.services.scheduler.outbox import FLOAT_BYTES, VectorOutbox
from blockyard.services.scheduler.queue.policy import Policy
from blockyard.services.scheduler.sequences.requests import Phase
from blockyard.shared.messages import PackedVectors, VectorFailure
from blockyard.shared.token_ids import ID_BYTES


class PackedResults:
    def __init__(self, lifecycle: Lifecycle, policy: Policy, vectors: VectorOutbox) -> None:
        self._lifecycle, self._policy, self._vectors = lifecycle, policy, vectors

    def apply(self, runs: ReadOnly[PackedRun], found: PackedVectors) -> int:
        """Returns the tokens that were computed. The record of the plan has checked that the sizes fit."""
        lengths, widths = array("I", found.lengths), _width_of_each(runs, found.widths)
        first = begin = num_tokens = 0
        for run, width in zip(runs, widths, strict=True):
            amount = run.amount
            last = first + amount.sequences
            end = begin + FLOAT_BYTES * sum(lengths[first:last])
            failed = [one for one in found.failures if first <= one.index < last]
            self._policy.on_freed(run.sequence)
            if run.sequence.phase is not Phase.ENDED:
                sizes = found.lengths[ID_BYTES * first : ID_BYTES * last]
                self._send(run, sizes, found.data[begin:end], width, failed, first)
            first, begin = last, end
            num_tokens += amount.tokens
        return num_tokens

    def _send(
        self, run: PackedRun, lengths: bytes, data: bytes, width: int, failed: list[VectorFailure], first: int
    ) -> None:
        """first: the place of the first text in the step."""
        request, indexes = run.sequence.request, run.texts.indexes
        assert request.pool is not None and request.texts is not None, "it is packed"
        pool = self._lifecycle.pools[request.pool.id]
        if failed:
            sizes = array("I", lengths)
            for one in reversed(failed):
                self._vectors.fail(pool, indexes.pop(one.index - first), one.detail, one.status)
                del sizes[one.index - first]
            lengths = sizes.tobytes()
        self._vectors.add_block(pool, indexes, lengths, data, width, run.queued_s)
        request.texts.finish(run.texts)
        if request.texts.is_empty:
            self._lifecycle.end(run.sequence)


def _width_of_each(runs: ReadOnly[PackedRun], widths: list[int]) -> list[int]:
    """The width of each run's results: runs with the same parameters are one part of the plan."""
    found: list[int] = []
    parts = iter(widths)
    for i, run in enumerate(runs):
        found.append(found[-1] if i and run.is_like(runs[i - 1]) else next(parts))
    return found
