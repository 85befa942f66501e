"""Steps with prefill that run ahead of the host: prompt tokens come from the host, decoded tokens from the device.

Rows of decodes come first: their ids and positions are gathered from the slots. Rows of prefills follow: the host sends
them with everything else in one copy. The last layer and the logits are computed for the last token of each sequence,
and not at all if no sequence samples. In a step that scores a prompt the last layer computes all tokens.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from blockyard.kernels.kv_cache.paged_kv import PagedKVMetadata
from blockyard.kernels.slots.slot_state import NUM_INPUT_WORDS, StepInputs
from blockyard.services.gpu_worker.arrays import Ints
from blockyard.services.gpu_worker.attention.metadata import AttentionMetadata
from blockyard.services.gpu_worker.execution.cuda.decode_graphs import DecodeSteps
from blockyard.services.gpu_worker.execution.cuda.stored_layers import LayerRecorder
from blockyard.services.gpu_worker.execution.pinned_ring import StepBuffers
from blockyard.services.gpu_worker.slots import Slots, StepRows
from blockyard.services.gpu_worker.step import InputVectors, LogitsIndices, Step

ALIGNED = 16  # words: kernels are compiled again for views at other alignments


def _up(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


@dataclass(frozen=True, slots=True)
class BatchDescriptor:
    """Padded sizes of a step with prefill: the key of its CUDA graph, and the layout of its input words, int64.

    One more token, of no slot, follows the tokens: it is the last token of padding sequences.
    """

    num_decodes: int  # with padding at the end, as all of these
    num_prefill_tokens: int  # padding tokens are one more prefill, of no slot
    num_prefills: int
    num_seqs: int  # sequences that may sample
    keeps_hidden: bool = False  # the last layer computes all tokens, and their rows are kept
    is_adapted: bool = False  # a sequence has an adapter

    @property
    def num_tokens(self) -> int:
        return self.num_decodes + self.num_prefill_tokens

    @property
    def stride(self) -> int:
        return _up(self.num_tokens + 1)

    @property
    def parts(self) -> list[int]:
        """Lengths: tokens, last token of each sequence twice, counts, first row of each prefill."""
        sizes = (
            NUM_INPUT_WORDS * self.stride,
            self.num_seqs,
            self.num_seqs,
            (self.num_seqs + 1) // 2,
            self.num_prefills // 2 + 1,
        )
        return [_up(size) for size in sizes]


def write_padding(words: Tensor, descriptor: BatchDescriptor) -> None:
    """Writes a step of padding alone."""
    rows, last, places, counts, starts = (part.numpy() for part in torch.split(words, descriptor.parts))
    table = rows.reshape(NUM_INPUT_WORDS, -1)
    table[:] = 0
    table[[2, 4]] = -1  # slots and sampled_slots
    last[:] = descriptor.num_tokens
    places[:] = counts[:] = 0
    starts.view(np.int32)[: descriptor.num_prefills] = descriptor.num_decodes
    starts.view(np.int32)[descriptor.num_prefills] = descriptor.num_tokens


def write_trial(words: Tensor, descriptor: BatchDescriptor, vocab_size: int) -> None:
    """Writes padding with unlike tokens: see `write_padding`.

    The same one in all rows would read few experts of a mixture, and the step be measured as too quick.
    """
    write_padding(words, descriptor)
    words[: descriptor.num_tokens] = torch.arange(descriptor.num_tokens) % vocab_size


def write_step(words: Tensor, descriptor: BatchDescriptor, step: StepRows, table: Slots) -> bool:
    """Writes a step. The host has the ids of all prefill tokens.

    Returns whether a slot may sample.
    """
    write_padding(words, descriptor)
    rows, last, places, sizes, starts = (part.numpy() for part in torch.split(words, descriptor.parts))
    ids, positions, owners, index, sampled_slots = rows.reshape(NUM_INPUT_WORDS, -1)
    first_rows = starts.view(np.int32)
    slots, counts, num_decodes, row = step.slots, step.counts, step.num_decodes, descriptor.num_decodes
    has_samples = num_decodes > 0
    last[: len(slots)] = np.arange(len(slots))
    for i in range(num_decodes, len(slots)):
        slot, count = int(slots[i]), int(counts[i])
        begin, end, stop = int(table.num_computed[slot]), row + count, int(table.num_computed[slot]) + count
        ids[row:end] = table.token_ids[slot, begin:stop]
        positions[row:end] = np.arange(begin, stop)
        index[row:end] = np.arange(begin + 1, stop + 1)
        owners[row:end] = slot
        due = int(table.num_tokens[slot]) - 1 - begin  # the first row before a sampled token
        if due < count:
            sampled_slots[row + max(due, 0) : end] = slot
            has_samples = True
        last[i] = end - 1
        first_rows[i - num_decodes + 1] = row = end
    places[: len(slots)] = last[: len(slots)]
    sizes.view(np.int32)[: len(slots)] = counts
    first_rows[len(slots) - num_decodes + 1 : descriptor.num_prefills] = row
    return has_samples


def token_rows(step: StepRows, table: Slots) -> tuple[Ints, Ints]:
    """The slot and the position of each token of a step's prefills."""
    slots, counts = step.slots[step.num_decodes :], step.counts[step.num_decodes :]
    rows, ends = np.repeat(slots, counts), np.cumsum(counts)
    return rows, np.arange(len(rows)) + np.repeat(table.num_computed[slots] + counts - ends, counts)


def host_words(words: Tensor, descriptor: BatchDescriptor, num_logits: int | None) -> bytes:
    """Returns what a step sends its followers, see `DeviceForward`. num_logits: None for all tokens."""
    rows, last, places, _, starts = (part.numpy() for part in torch.split(words, descriptor.parts))
    table = rows.reshape(NUM_INPUT_WORDS, -1)  # ids, positions and slots are its first rows
    prefills = table[:3, descriptor.num_decodes : descriptor.num_tokens]
    sent = [*prefills, starts.view(np.int32)[: descriptor.num_prefills + 1]]
    sent += [] if num_logits is None else [places[:num_logits], last[:num_logits]]
    return np.concatenate(sent, dtype=np.int32, casting="same_kind").tobytes()


def max_context(step: StepRows, table: Slots) -> int:
    """The most tokens that a prefill of a step has in the cache before it."""
    return int(table.num_computed[step.slots[step.num_decodes :]].max(initial=0))


class PrefillSteps:
    """Builds steps with prefill on the slots, buffers and kernels of the decode steps."""

    def __init__(self, steps: DecodeSteps) -> None:
        self._steps, self._device = steps, steps.pool.device

    def descriptor(self, step: StepRows, keeps_hidden: bool = False, is_adapted: bool = False) -> BatchDescriptor:
        """The exact sizes of a step."""
        return BatchDescriptor(
            step.num_decodes,
            int(step.counts.sum()) - step.num_decodes,
            len(step) - step.num_decodes,
            self._steps.padded_num_seqs(len(step)),
            keeps_hidden,
            is_adapted,
        )

    def prepare(
        self,
        buffers: StepBuffers,
        descriptor: BatchDescriptor,
        step: StepRows,
        table: Slots,
        layers: LayerRecorder | None = None,
        vectors: InputVectors | None = None,
    ) -> "PrefillStep":
        """layers: records which layers are stored. vectors: inputs of tokens in place of their ids."""
        words = buffers.words(sum(descriptor.parts))
        has_samples = write_step(words, descriptor, step, table)
        max_seq_len = int((table.num_computed[step.slots] + step.counts).max())
        max_context_len = max_context(step, table)
        on_device = words.to(self._device, non_blocking=True)
        return PrefillStep(
            *(self._steps, descriptor, on_device, has_samples, max_seq_len, layers, max_context_len, words, vectors)
        )


@dataclass(frozen=True, slots=True)
class SamplerInput:
    """Output of a forward pass for the sampler, one row for each sequence."""

    last: StepInputs  # its last token
    counts: Tensor  # [seqs] int32, tokens computed
    logits: Tensor | None  # [seqs, vocab_size]; None: no sequence samples
    hidden: Tensor | None = None  # [tokens, hidden], of all tokens, if the step `keeps_hidden`


class PrefillStep:
    """A step with its words, as `write_step` wrote them, on the device."""

    def __init__(
        self,
        steps: DecodeSteps,
        descriptor: BatchDescriptor,
        words: Tensor,
        has_samples: bool = True,
        max_seq_len: int | None = None,
        layers: LayerRecorder | None = None,
        max_context_len: int = 0,
        host: Tensor | None = None,
        vectors: InputVectors | None = None,
    ) -> None:
        """has_samples: a slot may sample. max_seq_len: of the prompts, with this step; None: unknown.

        layers: records which layers are stored. max_context_len: of the prompts, before this step; it need not be known
        unless a layer is latent. host: the words in host memory; None: there are no followers. vectors: inputs of
        tokens in place of their ids.
        """
        self._steps, self._descriptor, self._has_samples, self._max_seq_len = (
            steps,
            descriptor,
            has_samples,
            max_seq_len,
        )
        self._layers, self._max_context_len, self._host, self._vectors = layers, max_context_len, host, vectors
        self._words = list(torch.split(words, descriptor.parts))
        self._table = self._words[0].view(NUM_INPUT_WORDS, -1)
        self._inputs = StepInputs(*(row[: descriptor.num_tokens] for row in self._table))

    def forward(self) -> SamplerInput:
        seqs, has_samples = self._descriptor.num_seqs, self._has_samples
        self._gather()
        last = StepInputs(*(row[:seqs] for row in self._table.index_select(1, self._words[1])))
        num_logits = seqs if has_samples else 0
        logits_indices = LogitsIndices(
            self._words[2][:num_logits], last.slots[:num_logits], last.positions[:num_logits]
        )
        kept = self._forward(None) if self._descriptor.keeps_hidden else None
        counts, model = self._words[3].view(torch.int32)[:seqs], self._steps.model
        if kept is None:
            hidden = self._forward(logits_indices)
            return SamplerInput(last, counts, model.logits(hidden) if has_samples else None, kept)
        hidden = kept.index_select(0, logits_indices.rows)
        with model.adapter_rows.only(logits_indices.rows):
            return SamplerInput(last, counts, model.logits(hidden) if has_samples else None, kept)

    def sample(self, due: SamplerInput, needs_processing: bool) -> None:
        """Samples slots that have computed all tokens, advances all. needs_processing: see `DecodeSteps.sample`."""
        if due.logits is not None:
            self._steps.sample_rows(due.last, due.logits, needs_processing, due.counts)
        else:
            self._steps.advance(due.last, due.counts)

    def _gather(self) -> None:
        if self._descriptor.num_decodes:
            self._steps.ops.gather_inputs(self._steps.slots.state, self._inputs.first(self._descriptor.num_decodes))

    def _forward(self, logits_indices: LogitsIndices | None) -> Tensor:
        steps, inputs = self._steps, self._inputs
        metadata = AttentionMetadata(
            PagedKVMetadata(inputs.slots, inputs.positions, steps.slots.state.tables),
            query_start_loc=self._words[4].view(torch.int32)[: self._descriptor.num_prefills + 1],
            num_decodes=self._descriptor.num_decodes,
            prefill_max_seq_len=self._max_seq_len,
            max_context_len=self._max_context_len,
        )
        num_logits = None if logits_indices is None else len(logits_indices.rows)
        words = b""
        if steps.mirror is not None:
            assert self._host is not None
            words = host_words(self._host, self._descriptor, num_logits)
        attend = steps.attend(metadata, self._descriptor.num_decodes, self._layers, words)
        steps.begin_adapters(inputs.slots, is_adapted=self._descriptor.is_adapted)
        return steps.model.forward(Step(inputs.token_ids, inputs.positions, attend, logits_indices, self._vectors))
