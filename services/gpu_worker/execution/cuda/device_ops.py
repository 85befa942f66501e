"""The operations of a step on the GPU besides the model. Imports Triton."""

from torch import Tensor

from blockyard.kernels.attention.fused_decode import SplitSemaphores
from blockyard.kernels.sampling.copy_logits import copy_logits
from blockyard.kernels.sampling.logprobs import gather_logprobs
from blockyard.kernels.sampling.penalize_logits import count_tokens, penalize_logits
from blockyard.kernels.sampling.sample_tokens import sample_tokens
from blockyard.kernels.sampling.sampling_state import (
    AdjustedLogits,
    LogitsEdits,
    LogprobsTensors,
    RowMasks,
    SamplingTensors,
)
from blockyard.kernels.sampling.wait_for_masks import publish_sampled, wait_for_masks
from blockyard.kernels.slots.advance_slots import advance_slots
from blockyard.kernels.slots.gather_inputs import gather_inputs
from blockyard.kernels.slots.record_step import record_step
from blockyard.kernels.slots.scatter_words import scatter_words
from blockyard.kernels.slots.slot_changes import collect_changes, write_changes
from blockyard.kernels.slots.slot_state import SlotState, StepInputs
from blockyard.services.gpu_worker.attention.choice import FUSED_DECODE_MAX_LEN, FUSED_DECODE_MAX_ROWS
from blockyard.services.gpu_worker.attention.metadata import AttentionMetadata
from blockyard.services.gpu_worker.attention.triton_attention import build_attention
from blockyard.services.gpu_worker.kv.pool import KVPool
from blockyard.services.gpu_worker.step import Attend

# Reads of the tags of missing masks: about 0.2 ms or more on an H200, where one takes 4 us or more. A step of few rows
# reads longer: a row without its mask loses a whole step, and few others are held up.
MASK_POLLS, MORE_MASK_POLLS = 40, 160


class DeviceOps:
    """The operations of a step besides the model, as Triton kernels on one stream.

    Tests on the CPU override them by the kernels' references.
    """

    def __init__(self, fused_max_len: int = 0, batch_invariant: bool = False) -> None:
        """fused_max_len: up to so many keys, attention of few rows is one kernel; 0: never.

        batch_invariant: a row's token depends on that row alone.
        """
        self._fused_max_len, self._batch_invariant = fused_max_len, batch_invariant
        self._semaphores: SplitSemaphores | None = None

    def fused_decode_max_len(self, rows: int) -> int:
        """Longest sequence that the fused decode attention supports at this number of rows; 0: not supported."""
        return self._fused_max_len if 0 < rows <= FUSED_DECODE_MAX_ROWS else 0

    def scatter(self, arena: Tensor, pairs: Tensor, count: int) -> None:
        scatter_words(arena, pairs, count)

    def gather_inputs(self, state: SlotState, inputs: StepInputs) -> None:
        gather_inputs(state, inputs)

    def collect_changes(self, state: SlotState, slots: Tensor, changes: Tensor) -> None:
        collect_changes(state, slots, changes)

    def write_changes(self, state: SlotState, changes: Tensor) -> None:
        write_changes(state, changes)

    def record_step(self, step: Tensor, words: Tensor, index: int) -> None:
        record_step(step, words, index)

    def attend(self, pool: KVPool, metadata: AttentionMetadata) -> Attend:
        """The attention of a step, for all layers."""
        if self._fused_max_len and self._semaphores is None:
            self._semaphores = SplitSemaphores(FUSED_DECODE_MAX_ROWS * pool.shape.num_heads, pool.device)
        return build_attention(pool, metadata, self._semaphores)

    def wait_for_masks(self, inputs: StepInputs, rows: RowMasks) -> None:
        polls = mask_polls(len(inputs.sampled_slots))
        wait_for_masks(inputs.sampled_slots, inputs.index, rows.masks, rows.states, rows.words, polls)

    def publish_sampled(self, tokens: Tensor, best: Tensor, inputs: StepInputs, rows: RowMasks) -> None:
        publish_sampled(tokens, best, inputs.sampled_slots, inputs.index, rows.masks, rows.states)

    def penalize(self, logits: Tensor, inputs: StepInputs, edits: LogitsEdits, masked: RowMasks | None) -> None:
        penalize_logits(logits, inputs.sampled_slots, inputs.index, edits, masked)

    def sample(
        self,
        logits: Tensor,
        inputs: StepInputs,
        params: SamplingTensors,
        tokens: Tensor,
        best: Tensor,
        adjusted: AdjustedLogits | None,
    ) -> None:
        slots, index = inputs.sampled_slots, inputs.index
        sample_tokens(logits, slots, index, params, tokens, best, adjusted, self._batch_invariant)

    def count_tokens(self, tokens: Tensor, best: Tensor, ready: Tensor, inputs: StepInputs, edits: LogitsEdits) -> None:
        count_tokens(tokens, best, ready, inputs.sampled_slots, edits)

    def copy_logits(self, logits: Tensor, inputs: StepInputs, row: Tensor, out: Tensor) -> None:
        copy_logits(logits, inputs.sampled_slots, row, out)

    def gather_logprobs(
        self, logits: Tensor, slots: Tensor, tokens: Tensor, num_top: Tensor, out: LogprobsTensors
    ) -> None:
        gather_logprobs(logits, slots, tokens, num_top, out)

    def advance(
        self,
        state: SlotState,
        inputs: StepInputs,
        tokens: Tensor,
        best: Tensor,
        ready: Tensor,
        eos: Tensor,
        results: Tensor,
        counts: Tensor | None,
    ) -> None:
        advance_slots(state, inputs, tokens, best, ready, eos, results, counts)


def mask_polls(rows: int) -> int:
    """How often a step of so many rows reads the tags of missing masks."""
    return MASK_POLLS + MORE_MASK_POLLS // max(rows, 1)


def make_device_ops(pool: KVPool, fused_steps: bool) -> DeviceOps:
    """The operations of a worker's steps, which are also what it compiles. fused_steps: see `WorkerConfig`."""
    is_fused = fused_steps and not pool.batch_invariant and not pool.shape.has_latent
    return DeviceOps(FUSED_DECODE_MAX_LEN if is_fused else 0, pool.batch_invariant)
