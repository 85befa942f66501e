"""Divides the texts of a step among threads of the CPU, each of which computes whole texts.

Threads that share each product wait for each other at its end, 100 times a step. Beside other work on the same cores
that takes longer than the products: two threads of OpenMP then computed 2 texts/s where one computed 8 to 21.
"""

import heapq
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from blockyard.services.gpu_worker.arrays import Ints

EVEN_LENGTH = 1024.0  # of a text whose attention takes as long as its other products
LEAST_TOKENS = 64  # of a share: a thread computes fewer in the time that it takes to wake up

Forward = Callable[[Ints, Ints], Tensor]  # given the rows of some texts and their lengths: hidden states of the rows


class TextThreads:
    """Threads for shares of a step. Those of torch are divided among the shares."""

    def __init__(self, num_threads: int) -> None:
        """num_threads: at most so many shares."""
        self.num_threads, self._num_of_torch = num_threads, torch.get_num_threads()
        self._others = ThreadPoolExecutor(max(1, num_threads - 1), "texts")

    def run(self, forward: Forward, lengths: Ints) -> Tensor:
        """Returns the hidden states of all rows. lengths: of the texts, in the order of their rows."""
        shares = divide(lengths, min(self.num_threads, len(lengths), int(lengths.sum()) // LEAST_TOKENS))
        if len(shares) == 1:
            torch.set_num_threads(self._num_of_torch)
            return forward(np.arange(lengths.sum()), lengths)
        starts = np.cumsum(lengths) - lengths
        num_of_torch = max(1, self._num_of_torch // len(shares))
        rows = [rows_of(starts[places], lengths[places]) for places in shares]

        def compute(share: int) -> Tensor:
            torch.set_num_threads(num_of_torch)  # of this thread
            with torch.inference_mode():  # is a thread's own, too
                return forward(rows[share], lengths[shares[share]])

        others = [self._others.submit(compute, share) for share in range(1, len(shares))]
        first = compute(0)
        out = first.new_empty((int(lengths.sum()), first.shape[1]))
        for own, hidden in zip(rows, [first, *(other.result() for other in others)], strict=True):
            out[torch.from_numpy(own)] = hidden
        return out


def divide(lengths: Ints, most: int) -> list[Ints]:
    """The places of the texts of each share, in order: longest texts first, each to the share with the least work."""
    if most <= 1:
        return [np.arange(len(lengths))]
    costs = lengths + lengths**2 / EVEN_LENGTH
    loads = [(0.0, share) for share in range(most)]
    shares: list[list[int]] = [[] for _ in loads]
    for place in np.argsort(-costs, kind="stable").tolist():
        load, share = loads[0]
        shares[share].append(place)
        heapq.heapreplace(loads, (load + float(costs[place]), share))
    return [np.sort(np.array(places)) for places in shares]


def rows_of(starts: Ints, lengths: Ints) -> Ints:
    """The rows of some texts, one text behind the other."""
    rows: Ints = np.arange(int(lengths.sum())) + np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
    return rows
