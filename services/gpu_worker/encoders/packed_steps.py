"""Steps of a model without KV: packed sequences, whole, in one forward pass. The same on a GPU and on the CPU."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from blockyard.services.gpu_worker.arrays import Ints
from blockyard.services.gpu_worker.attention.packed_attention import PackedAttention, PackedProduct
from blockyard.services.gpu_worker.execution.packed_graphs import PackedGraphs
from blockyard.services.gpu_worker.execution.text_threads import TextThreads
from blockyard.services.gpu_worker.host_link import put
from blockyard.services.gpu_worker.models.interface import Model
from blockyard.services.gpu_worker.pooling.chunks import PooledChunk
from blockyard.services.gpu_worker.pooling.output import OptionRuns, PooledResults, PoolingOutput
from blockyard.services.gpu_worker.step import Step

Announce = Callable[[Step, Ints], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch:
    """The texts of a step, one behind the other."""

    token_ids: Ints  # [tokens]
    lengths: Ints  # [texts]; none is empty
    skips: Ints  # [texts]: leading tokens that are not pooled
    options: OptionRuns
    second_starts: Ints | None = None  # [texts]: where the second text of a pair begins; None: no text is a pair


class PackedSteps:
    """Computes hidden states of packed sequences and pools them."""

    def __init__(
        self,
        model: Model,
        output: PoolingOutput,
        make_product: Callable[[Ints], PackedProduct],
        graphs: PackedGraphs | None = None,
        threads: TextThreads | None = None,
        announce: Announce | None = None,
    ) -> None:
        """make_product: the attention of sequences of these lengths, on the device. graphs: None: steps are eager.
        threads: that compute a step; None: this one. announce: called before a step is computed, with the lengths of
        its sequences."""
        self.output, self.graphs, self._threads, self._announce = output, graphs, threads, announce
        self._model, self._make_product = model, make_product

    def run(self, batch: PackedBatch) -> PooledResults:
        """Launches a step. On a GPU it returns before the step is done."""
        lengths = batch.lengths
        starts = np.cumsum(lengths) - lengths
        positions = np.arange(len(batch.token_ids)) - np.repeat(starts, lengths)
        types = None
        if batch.second_starts is not None:
            types = (positions >= np.repeat(batch.second_starts, lengths)).astype(np.int64)
        with torch.inference_mode():
            hidden = None
            if self.graphs is not None:
                hidden = self.graphs.forward(batch.token_ids, positions, lengths, types=types)
            if hidden is None and self._threads is not None:
                forward = partial(self._forward_rows, batch.token_ids, positions, types)
                hidden = self._threads.run(forward, lengths)
            elif hidden is None:
                hidden = self._forward(batch.token_ids, positions, types, lengths)
            places, link = np.arange(len(lengths)), self._model.table.link
            columns = places, np.zeros_like(lengths), lengths, lengths, batch.skips
            return self.output.add(PooledChunk(hidden, *columns, batch.token_ids, link), batch.options)

    def _forward_rows(self, token_ids: Ints, positions: Ints, types: Ints | None, rows: Ints, lengths: Ints) -> Tensor:
        """The forward pass of some texts: their rows and lengths."""
        return self._forward(token_ids[rows], positions[rows], None if types is None else types[rows], lengths)

    def _forward(self, token_ids: Ints, positions: Ints, types: Ints | None, lengths: Ints) -> Tensor:
        """Launches the forward pass kernel by kernel."""
        attend = PackedAttention(self._model.shape.attention, self._make_product(lengths))
        on_device = None if types is None else self._put(types)
        step = Step(self._put(token_ids), self._put(positions), attend, token_types=on_device)
        if self._announce is not None:
            self._announce(step, lengths)
        return self._model.forward(step)

    def _put(self, values: Ints) -> Tensor:
        return put(values, self._model.table.device, self._model.table.link)
