"""Unigram and trigram models of the training tokens: what the demo model has to beat.

The trigram is interpolated down to the uniform distribution with Witten-Bell weights: a context seen c times with t
different successors trusts its own counts by c / (c + t). It has nothing to tune.
"""

import numpy as np
import numpy.typing as npt

from demo_training.packing import Ids
from demo_training.train_tokenizer import VOCAB_SIZE

Counts = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class NgramModel:
    """Probabilities of a token after up to `order - 1` others."""

    def __init__(self, documents: list[Ids], order: int) -> None:
        self.order = order
        self._grams: list[tuple[Counts, Counts]] = []  # a length: sorted keys, how often
        self._contexts: list[tuple[Counts, Counts, Counts]] = []  # a length: sorted keys, how often, successors
        for length in range(1, order + 1):
            keys = np.concatenate([gram_keys(document, length) for document in documents])
            grams, counts = np.unique(keys, return_counts=True)
            heads, firsts, successors = np.unique(grams // VOCAB_SIZE, return_index=True, return_counts=True)
            self._grams.append((grams, counts))
            self._contexts.append((heads, np.add.reduceat(counts, firsts), successors))

    def probabilities(self, document: Ids) -> Floats:
        """[len(document) - 1]: of every token but the first."""
        size = len(document) - 1
        result: Floats = np.full(size, 1 / VOCAB_SIZE)
        for length in range(1, self.order + 1):
            keys = gram_keys(document, length)[-size:]  # shorter than size where a token lacks so long a past
            (counts,) = looked_up(keys, self._grams[length - 1][0], self._grams[length - 1][1])
            heads, seen, successors = self._contexts[length - 1]
            seen, successors = looked_up(keys // VOCAB_SIZE, heads, seen, successors)
            known = seen > 0
            lower = result[-len(keys) :]
            mixed = (counts[known] + successors[known] * lower[known]) / (seen[known] + successors[known])
            lower[known] = mixed  # a view: writes into result
        return result

    def total_nats(self, documents: list[Ids]) -> float:
        return float(sum(-np.log(self.probabilities(document)).sum() for document in documents))


def gram_keys(document: Ids, length: int) -> Counts:
    """A number for every run of `length` tokens, the last token in the lowest digits of base VOCAB_SIZE."""
    ids = document.astype(np.int64)
    keys: Counts = np.zeros(max(len(ids) - length + 1, 0), dtype=np.int64)
    for place in range(length):
        keys = keys * VOCAB_SIZE + ids[place : place + len(keys)]
    return keys


def looked_up(keys: Counts, known: Counts, *columns: Counts) -> tuple[Counts, ...]:
    """Each column's value at `keys`, 0 where a key is not among the sorted `known`."""
    places = np.minimum(np.searchsorted(known, keys), len(known) - 1)
    hit = known[places] == keys
    return tuple(np.where(hit, column[places], 0) for column in columns)
