"""Steps of a model without KV: packed sequences, whole, in one forward pass. The same on a GPU and on the CPU."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from blockyard.services.gpu_worker.arrays import Ints
from blockyard.services.gpu_worker.attention.packed_attention import PackedAttention, PackedProduct
from blockyard.services.gpu_worker.host_link import put
from blockyard.services.gpu_worker.models.interface import Model
from blockyard.services.gpu_worker.pooling.chunks import PooledChunk, PooledSequence
from blockyard.services.gpu_worker.pooling.output import DEFAULT, PooledResults, PoolingOptions, PoolingOutput
from blockyard.services.gpu_worker.step import Step


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedText:
    """A sequence of a packed step."""

    slot: int
    token_ids: Ints
    second_start: int | None = None  # where the second text of a pair begins; None: there is one text
    skip: int = 0  # leading tokens that are not pooled
    options: PoolingOptions = DEFAULT


class PackedSteps:
    """Computes hidden states of packed sequences and pools them."""

    def __init__(self, model: Model, output: PoolingOutput, make_product: Callable[[Ints], PackedProduct]) -> None:
        """make_product: the attention of sequences of these lengths, of the device."""
        self.output = output
        self._model, self._make_product = model, make_product

    def run(self, texts: Sequence[PackedText]) -> PooledResults:
        """Launches a step. On a GPU it returns before the step is done."""
        lengths = np.array([len(text.token_ids) for text in texts], np.int64)
        ids = np.concatenate([text.token_ids for text in texts]).astype(np.int64)
        starts = np.cumsum(lengths) - lengths
        positions = np.arange(len(ids)) - np.repeat(starts, lengths)
        with torch.inference_mode():
            step = Step(
                self._put(ids),
                self._put(positions),
                PackedAttention(self._model.shape.attention, self._make_product(lengths)),
                token_types=self._token_types(texts, lengths, positions),
            )
            hidden = self._model.forward(step)
            columns = zip(texts, lengths.tolist(), strict=True)
            whole = [PooledSequence(one.slot, 0, n, n, one.skip) for one, n in columns]
            return self.output.add(
                PooledChunk(hidden, whole, ids, self._model.table.link), [one.options for one in texts]
            )

    def _token_types(self, texts: Sequence[PackedText], lengths: Ints, positions: Ints) -> torch.Tensor | None:
        """0 for the first text of a pair, 1 for the second; None: no sequence is a pair."""
        if all(text.second_start is None for text in texts):
            return None
        second = [len(text.token_ids) if text.second_start is None else text.second_start for text in texts]
        return self._put((positions >= np.repeat(np.array(second), lengths)).astype(np.int64))

    def _put(self, values: Ints) -> torch.Tensor:
        return put(values, self._model.table.device, self._model.table.link)
