"""CUDA graphs of packed steps of a few sizes: launching the kernels of a small step takes longer than they run.

A graph holds the forward pass of so many tokens and texts. A step is padded to the next size: rows behind its tokens
belong to no text, and texts behind its own are empty. Larger steps, and those of very many short texts, are eager. A
step of short texts alone has a graph of its own, in which attention has small tiles.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from blockyard.services.gpu_worker.arrays import Integers, Ints
from blockyard.services.gpu_worker.attention.packed_attention import PackedAttention, PackedProduct
from blockyard.services.gpu_worker.host_link import put
from blockyard.services.gpu_worker.models.interface import Model
from blockyard.services.gpu_worker.step import Step

log = logging.getLogger(__name__)

# tokens: padding is a third of a large step at most
SIZES = (16, 32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
TOKENS_OF_A_TEXT = 8  # a size has room for one text in so many tokens
SHORT = 32  # tokens: on an H200 512 texts of 16 took attention 134 us in tiles for long texts, 38 us in small ones
MOST_TEXTS, FEWEST_TEXTS = 512, 4  # attention looks for each text, also where there is none


class ForwardReplay(Protocol):
    def replay(self) -> None: ...


Capture = Callable[[Callable[[], Tensor]], tuple[ForwardReplay, Tensor]]  # what replays a computation, and its output


@dataclass(frozen=True, slots=True)
class PackedGraph:
    """The graph of one size."""

    num_tokens: int
    num_texts: int
    starts: Tensor  # [num_texts + 1] int32: as in `TritonPackedProduct`
    replay: ForwardReplay
    hidden: Tensor  # [num_tokens, hidden]: the output


class PackedGraphs:
    """Captures the forward pass of a model without KV, and replays it for steps that fit."""

    def __init__(
        self,
        model: Model,
        capture: Capture,
        make_product: Callable[[Tensor, int], PackedProduct],
        *,
        most_tokens: int,
        has_types: bool,
    ) -> None:
        """make_product: attention of the sequences between these starts, the longest of which has so many tokens.
        most_tokens: of a step."""
        self._model, self._capture, self._make_product = model, capture, make_product
        sizes = [size for size in SIZES if size <= most_tokens]
        device, largest = model.table.device, max(sizes, default=0)
        self._sizes: Sequence[int] = sizes
        self._ids, self._positions, self._types = (
            torch.zeros(largest, dtype=torch.int64, device=device) for _ in range(3)
        )
        self._has_types = has_types
        most = model.shape.max_positions
        self._longest = sorted({min(SHORT, most), most})
        self._graphs: dict[tuple[int, int], PackedGraph] = {}  # by size and longest text

    def capture(self) -> str:
        """Captures all sizes. Returns a line for the start report. After an error all steps are eager."""
        begun = time.perf_counter()
        try:
            with torch.inference_mode():
                for size in reversed(self._sizes):  # smaller graphs then use the memory of larger ones
                    for longest in self._longest[: 1 if size <= SHORT else None]:
                        self._graphs[size, longest] = self._capture_size(size, longest)
        except RuntimeError as e:  # includes OutOfMemoryError and CUDA errors
            self._graphs.clear()
            problem = str(e).splitlines()[0]
            log.warning("packed steps are eager, CUDA graphs could not be captured: %s", problem)
            return f"CUDA graphs of packed steps: none: {problem}"
        most = max(self._sizes, default=0)
        took_s = time.perf_counter() - begun
        return f"CUDA graphs of packed steps: {len(self._graphs)} of up to {most} tokens in {took_s:.1f} s"

    def drop(self) -> None:
        """The weights get other addresses: `capture` is to be called before a step is replayed."""
        self._graphs.clear()

    def forward(self, token_ids: Ints, positions: Ints, types: Ints | None, lengths: Ints) -> Tensor | None:
        """Returns the hidden states of a step [tokens, hidden]; None: no graph fits it.

        types: [tokens], None: all are 0.
        """
        num_tokens, num_texts = len(token_ids), len(lengths)
        size = next((size for size in self._sizes if size >= num_tokens), 0)
        longest = next(most for most in self._longest if most >= lengths.max())
        graph = self._graphs.get((size, longest))
        if graph is None or num_texts > graph.num_texts:
            return None
        starts = np.full(graph.num_texts + 1, num_tokens, np.int32)
        starts[: num_texts + 1] = np.concatenate([[0], np.cumsum(lengths)])
        self._fill(graph.starts, starts)
        self._fill(self._ids[:num_tokens], token_ids)
        self._fill(self._positions[:num_tokens], positions)
        if self._has_types:
            self._fill(self._types[:num_tokens], np.zeros(num_tokens, np.int64) if types is None else types)
        graph.replay.replay()
        # a copy: results are still read when the next replay overwrites the output
        return graph.hidden[:num_tokens].clone()

    def _fill(self, words: Tensor, values: Integers) -> None:
        words.copy_(put(values, self._model.table.device, self._model.table.link))

    def _capture_size(self, size: int, longest: int) -> PackedGraph:
        num_texts = min(max(size // TOKENS_OF_A_TEXT, FEWEST_TEXTS), MOST_TEXTS)
        starts = torch.full((num_texts + 1,), size, dtype=torch.int32, device=self._ids.device)
        starts[0] = 0
        self._ids[:size], self._positions[:size] = 0, 0
        attend = PackedAttention(self._model.shape.attention, self._make_product(starts, longest))
        types = self._types[:size] if self._has_types else None
        step = Step(self._ids[:size], self._positions[:size], attend, token_types=types)
        replay, hidden = self._capture(lambda: self._model.forward(step))
        return PackedGraph(size, num_texts, starts, replay, hidden)
