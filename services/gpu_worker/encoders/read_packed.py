"""From the columns of a packed step to arrays, and from the results of a step to its frame's block of bytes."""

from dataclasses import dataclass, replace

import numpy as np

from blockyard.services.gpu_worker.arrays import Ints
from blockyard.services.gpu_worker.encoders.packed_steps import PackedBatch
from blockyard.services.gpu_worker.pooling.output import NOT_FINITE, PooledResults, options_of
from blockyard.shared.messages import Geometry, PackedStep, PackedVectors, VectorFailure


@dataclass(frozen=True, slots=True)
class ReadTexts:
    """The texts of a packed step: those that run, and why others cannot."""

    batch: PackedBatch
    places: Ints  # of the texts of the batch in the step
    counts: Ints  # texts of each part of the step
    failures: list[VectorFailure]

    def results(self, pooled: PooledResults | None) -> PackedVectors:
        """The results of all texts. pooled: of the batch; None: it is empty."""
        lengths, widths = np.zeros(int(self.counts.sum()), "<u4"), np.zeros(int(self.counts.sum()), np.int64)
        failures, data = list(self.failures), b""
        if pooled is not None:
            found, data, found_widths = pooled.to_block()
            lengths[self.places], widths[self.places] = found, found_widths
            bad = np.sort(pooled.places[pooled.not_finite()])
            failures += [VectorFailure(place, NOT_FINITE) for place in self.places[bad].tolist()]
        firsts = np.cumsum(self.counts) - self.counts
        of_parts = [int(widths[first : first + n].max()) for first, n in zip(firsts, self.counts, strict=True)]
        return PackedVectors(lengths.tobytes(), data, of_parts, failures)


def read_packed(step: PackedStep, geometry: Geometry, has_types: bool) -> ReadTexts:
    """has_types: the model knows token types; without, pairs have none."""
    ids = np.frombuffer(step.token_ids, "<u4").astype(np.int64)
    lengths = np.frombuffer(step.lengths, "<u4").astype(np.int64)
    counts = np.array([part.count for part in step.parts], np.int64)
    seconds = None
    if has_types and any(part.second_starts for part in step.parts):
        seconds = lengths.copy()
        for end, part in zip(np.cumsum(counts), step.parts, strict=True):
            if part.second_starts:
                seconds[end - part.count : end] = np.frombuffer(part.second_starts, "<u4")
    batch = PackedBatch(
        token_ids=ids,
        lengths=lengths,
        skips=np.repeat(np.array([part.skip for part in step.parts], np.int64), counts),
        options=[(part.count, options_of(part.params)) for part in step.parts],
        second_starts=seconds,
    )
    failures = _problems(ids, lengths, geometry)
    places = np.arange(len(lengths))
    if failures:
        good = np.ones(len(lengths), np.bool_)
        good[[one.index for one in failures]] = False
        batch, places = _only(batch, good), np.flatnonzero(good)
    return ReadTexts(batch, places, counts, failures)


def _problems(ids: Ints, lengths: Ints, geometry: Geometry) -> list[VectorFailure]:
    """Why texts cannot run, in order."""
    most, vocab_size = geometry.max_model_len, geometry.vocab_size
    is_odd = (lengths < 1) | (lengths > most)
    found = {i: f"{lengths[i]} tokens do not fit a length of {most}" for i in np.flatnonzero(is_odd).tolist()}
    if len(ids) and int(ids.max()) >= vocab_size:
        outside = np.flatnonzero(ids >= vocab_size)
        owners = np.searchsorted(np.cumsum(lengths), outside, "right")
        for i, token in zip(owners.tolist(), ids[outside].tolist(), strict=True):
            found.setdefault(i, f"token id {token} is outside of the vocabulary of {vocab_size}")
    return [VectorFailure(i, found[i]) for i in sorted(found)]


def _only(batch: PackedBatch, good: "np.ndarray[tuple[int], np.dtype[np.bool_]]") -> PackedBatch:
    """The texts that can run."""
    ends = np.cumsum([count for count, _ in batch.options]).tolist()
    runs = [
        (int(good[end - count : end].sum()), option) for end, (count, option) in zip(ends, batch.options, strict=True)
    ]
    return replace(
        batch,
        token_ids=batch.token_ids[np.repeat(good, batch.lengths)],
        lengths=batch.lengths[good],
        skips=batch.skips[good],
        options=[run for run in runs if run[0]],
        second_starts=None if batch.second_starts is None else batch.second_starts[good],
    )
