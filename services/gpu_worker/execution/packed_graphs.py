"""CUDA graphs of steps that pool, of a few sizes: launching the kernels of a step may take longer than they run.

A graph holds the forward pass of so many tokens, with room for so many sequences. A size may have several graphs, whose
attention differs. A step is padded to the smallest size that fits it: rows behind its tokens belong to no sequence that
pools, and sequences behind its own are empty or padding. A step is eager if no size is so large, or if a size runs
longer than a launch and its padding is not small.

What differs between models is the attention: `TextGraphAttention` is that of texts without KV, and of decoders
`cuda.chunk_graphs` has one over the KV pool.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from blockyard.services.gpu_worker.arrays import Integers, Ints
from blockyard.services.gpu_worker.attention.packed_attention import PackedAttention, PackedProduct
from blockyard.services.gpu_worker.host_link import put
from blockyard.services.gpu_worker.models.interface import Model
from blockyard.services.gpu_worker.step import Attend, Step

log = logging.getLogger(__name__)

FEW_TOKENS = (16, 32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048)
TEXT_SIZES = (*FEW_TOKENS, 3072, 4096, 6144, 8192)  # tokens: padding is a third of a large step at most
SMALL_PADDING = 0.125  # of a step: so much costs less than what the host gains
USEFUL = 2.0  # device time of a graph to that of its launch, at most: launches of one worker differ, and few gain more
TOKENS_OF_A_TEXT = 8  # a size has room for one text in so many tokens
SHORT = 32  # tokens: on an H200 512 texts of 16 took attention 134 us in tiles for long texts, 38 us in small ones
MOST_TEXTS, FEWEST_TEXTS = 512, 4  # attention looks for each text, also where there is none


class ForwardReplay(Protocol):
    def replay(self) -> None: ...


@dataclass(frozen=True, slots=True)
class CapturedForward:
    """A computation that was captured, with measurements."""

    graph: ForwardReplay
    launch_s: float  # host time to launch its kernels one by one
    device_s: float


class GraphAttention(Protocol):
    """The attention of one size. Its kernels read tensors that stay, which `fill` writes."""

    attend: Attend

    def fits(self, counts: Ints) -> bool:
        """Whether it can be that of sequences with so many rows each."""

    def fill(self, counts: Ints, tables: Integers | None) -> None:
        """Begins a step. counts [sequences]: rows of each. tables [sequences, blocks]: of models with KV, the blocks of
        each."""


# Runs a computation once, and captures another run. None: it takes more memory than graphs may.
Capture = Callable[[Callable[[], None]], CapturedForward | None]
# Of a size: what tells its graphs apart, those first that are quicker where they fit.
Variants = Callable[[int], Sequence[int]]
# given the positions of a size [tokens] int64, and the variant
MakeAttention = Callable[[Tensor, int], GraphAttention]
# attention of the sequences between these starts, the longest of which has so many tokens
MakeProduct = Callable[[Tensor, int], PackedProduct]


@dataclass(frozen=True, slots=True)
class PackedGraph:
    """The graph of one size."""

    num_tokens: int
    attention: GraphAttention
    captured: CapturedForward

    def is_worth(self, num_tokens: int) -> bool:
        """Whether a step of so many tokens ends sooner than if it were eager, or about as soon."""
        padding = 1 - num_tokens / self.num_tokens
        return padding <= SMALL_PADDING or self.captured.device_s <= self.captured.launch_s


class PackedGraphs:
    """Captures the forward pass of a model that pools, and replays it for steps that fit."""

    def __init__(
        self,
        model: Model,
        capture: Capture,
        make_attention: MakeAttention,
        *,
        sizes: Sequence[int],
        variants: Variants,
        has_types: bool = False,
    ) -> None:
        """sizes: numbers of tokens, ascending."""
        self._model, self._capture, self._make_attention = model, capture, make_attention
        self._sizes, self._variants, self._has_types = sizes, variants, has_types
        device, self._largest = model.table.device, max(sizes, default=0)
        self._ids, self._positions, self._types = (
            torch.zeros(self._largest, dtype=torch.int64, device=device) for _ in range(3)
        )
        self._hidden: Tensor | None = None  # [largest, hidden], the output of all graphs; None: none is captured
        self._graphs: dict[tuple[int, int], PackedGraph] = {}  # by size and variant

    def capture(self) -> str:
        """Captures the largest size, and all others that may be useful. Returns a line for the start report.

        After an error all steps are eager.
        """
        begun, most_useful = time.perf_counter(), float(self._largest)
        try:
            with torch.inference_mode():
                for size in reversed(self._sizes):  # smaller graphs then use the memory of larger ones
                    if size <= most_useful:
                        most_useful = min(most_useful, self._capture_size(size))
        except RuntimeError as e:  # includes OutOfMemoryError and CUDA errors
            self.drop()
            problem = str(e).splitlines()[0]
            log.warning("packed steps are eager, CUDA graphs could not be captured: %s", problem)
            return f"CUDA graphs of packed steps: none: {problem}"
        most = max((size for size, _ in self._graphs), default=0)
        took_s = time.perf_counter() - begun
        return f"CUDA graphs of packed steps: {len(self._graphs)} of up to {most} tokens in {took_s:.1f} s"

    def drop(self) -> None:
        """The weights get other addresses: `capture` is to be called before a step is replayed."""
        self._graphs.clear()
        self._hidden = None

    def forward(
        self,
        token_ids: Ints,
        positions: Ints,
        counts: Ints,
        *,
        types: Ints | None = None,
        tables: Integers | None = None,
    ) -> Tensor | None:
        """Returns the hidden states of a step [tokens, hidden]; None: no graph fits it.

        types: [tokens], None: all are 0. counts, tables: see `GraphAttention.fill`.
        """
        num_tokens = len(token_ids)
        graph = self._find(num_tokens, counts)
        if graph is None or self._hidden is None:
            return None
        graph.attention.fill(counts, tables)
        self._fill(self._ids[:num_tokens], token_ids)
        padded = np.zeros(graph.num_tokens, np.int64)  # a sequence of padding begins at 0
        padded[:num_tokens] = positions
        self._fill(self._positions[: graph.num_tokens], padded)
        if self._has_types:
            self._fill(self._types[:num_tokens], np.zeros(num_tokens, np.int64) if types is None else types)
        graph.captured.graph.replay()
        # a copy: results are still read when the next replay overwrites the output
        return self._hidden[:num_tokens].clone()

    def _find(self, num_tokens: int, counts: Ints) -> PackedGraph | None:
        fitting = (
            graph
            for size in self._sizes
            if size >= num_tokens
            for variant in self._variants(size)
            if (graph := self._graphs.get((size, variant))) is not None and graph.attention.fits(counts)
        )
        graph = next(fitting, None)
        return graph if graph is not None and graph.is_worth(num_tokens) else None

    def _fill(self, words: Tensor, values: Integers) -> None:
        words.copy_(put(values, self._model.table.device, self._model.table.link))

    def _capture_size(self, size: int) -> float:
        """Returns how many tokens a size may have to be useful, as far as this one tells."""
        most_useful = float(size)
        self._positions[:size] = 0
        # unlike tokens: the same one in all rows would read few experts of a mixture
        self._ids[:size] = torch.arange(size, device=self._ids.device) % self._model.shape.vocab_size
        types = self._types[:size] if self._has_types else None
        for variant in self._variants(size):
            attention = self._make_attention(self._positions[:size], variant)
            step = Step(self._ids[:size], self._positions[:size], attention.attend, token_types=types)
            captured = self._capture(partial(self._run, step))
            if captured is not None:
                self._graphs[size, variant] = PackedGraph(size, attention, captured)
                most_useful = size * USEFUL * captured.launch_s / captured.device_s
        return most_useful

    def _run(self, step: Step) -> None:
        hidden = self._model.forward(step)
        if self._hidden is None:  # the first run is not part of a graph
            self._hidden = hidden.new_zeros(self._largest, hidden.shape[1])
        self._hidden[: len(hidden)].copy_(hidden)


class TextGraphAttention:
    """Attention of texts without KV. Implements `GraphAttention`."""

    def __init__(self, model: Model, make_product: MakeProduct, size: int, longest: int) -> None:
        """size: tokens. longest: of a text."""
        self._longest, self._room = longest, min(max(size // TOKENS_OF_A_TEXT, FEWEST_TEXTS), MOST_TEXTS)
        self._device, self._link = model.table.device, model.table.link
        self._starts = torch.full((self._room + 1,), size, dtype=torch.int32, device=self._device)
        self._starts[0] = 0  # as in `TritonPackedProduct`
        self.attend: Attend = PackedAttention(model.shape.attention, make_product(self._starts, longest))

    def fits(self, counts: Ints) -> bool:
        """Implements `GraphAttention`."""
        return len(counts) <= self._room and counts.max() <= self._longest

    def fill(self, counts: Ints, tables: Integers | None) -> None:
        """Implements `GraphAttention`."""
        starts = np.full(self._room + 1, counts.sum(), np.int32)
        starts[: len(counts) + 1] = np.concatenate([[0], np.cumsum(counts)])
        self._starts.copy_(put(starts, self._device, self._link))


def text_graphs(
    model: Model,
    capture: Capture,
    make_product: MakeProduct,
    *,
    most_tokens: int,
    has_types: bool,
) -> PackedGraphs:
    """Graphs of a model without KV, not captured. most_tokens: of a step."""
    most = model.shape.max_positions
    short = min(SHORT, most)
    return PackedGraphs(
        model,
        capture,
        lambda positions, longest: TextGraphAttention(model, make_product, len(positions), longest),
        sizes=[size for size in TEXT_SIZES if size <= most_tokens],
        variants=lambda size: (short,) if size <= short or short == most else (short, most),
        has_types=has_types,
    )
