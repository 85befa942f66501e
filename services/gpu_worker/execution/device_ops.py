"""The parts of a device step besides the model, as Triton kernels. Imports Triton."""

from typing import Protocol

from torch import Tensor

from blockyard.kernels.attention.fused_decode import SplitSemaphores
from blockyard.kernels.sampling.logprobs import LogprobsTensors, gather_logprobs
from blockyard.kernels.sampling.penalize_logits import LogitsEdits, count_tokens, penalize_logits
from blockyard.kernels.sampling.sample_tokens import AdjustedLogits, SamplingTensors, sample_tokens
from blockyard.kernels.slots.advance_slots import advance_slots
from blockyard.kernels.slots.gather_inputs import StepInputs, gather_inputs
from blockyard.kernels.slots.scatter_words import scatter_words
from blockyard.kernels.slots.slot_state import SlotState
from blockyard.services.gpu_worker.attention.choice import FUSED_DECODE_MAX_LEN, FUSED_DECODE_MAX_ROWS
from blockyard.services.gpu_worker.attention.triton_attention import build_attention
from blockyard.services.gpu_worker.kv.pool import KVPool
from blockyard.services.gpu_worker.step import Attend, LogitsIndices


class DeviceOps(Protocol):
    def fused_decode_max_len(self, rows: int) -> int:
        """Longest sequence that the fused decode attention supports at this number of rows; 0: not supported."""

    def scatter(self, arena: Tensor, pairs: Tensor, count: int) -> None: ...
    def gather(self, state: SlotState, rows: StepInputs) -> None: ...
    def attend(
        self,
        pool: KVPool,
        rows: StepInputs,
        tables: Tensor,
        starts: Tensor | None = None,
        num_decodes: int = 0,
        logits_indices: LogitsIndices | None = None,
        reach: int | None = None,
        longest: int | None = None,
    ) -> Attend: ...
    def adjust(self, logits: Tensor, rows: StepInputs, logits_edits: LogitsEdits) -> None: ...
    def draw(
        self,
        logits: Tensor,
        rows: StepInputs,
        params: SamplingTensors,
        tokens: Tensor,
        best: Tensor,
        adjusted: AdjustedLogits | None,
    ) -> None: ...
    def count(self, tokens: Tensor, best: Tensor, rows: StepInputs, logits_edits: LogitsEdits) -> None: ...
    def score(
        self, logits: Tensor, rows: StepInputs, tokens: Tensor, num_top: Tensor, out: LogprobsTensors
    ) -> None: ...
    def advance(
        self,
        state: SlotState,
        rows: StepInputs,
        tokens: Tensor,
        best: Tensor,
        eos: Tensor,
        results: Tensor,
        counts: Tensor | None,
    ) -> None: ...


class TritonDeviceOps:
    """`DeviceOps` by Triton kernels, on one stream."""

    def __init__(self, fused: bool = False, uniform: bool = False) -> None:
        """`fused`: attention of few rows is one kernel. `uniform`: a row's token follows from that row alone."""
        self._fused, self._uniform = fused, uniform
        self._semaphores: SplitSemaphores | None = None

    def fused_decode_max_len(self, rows: int) -> int:
        return FUSED_DECODE_MAX_LEN if self._fused and 0 < rows <= FUSED_DECODE_MAX_ROWS else 0

    def scatter(self, arena: Tensor, pairs: Tensor, count: int) -> None:
        scatter_words(arena, pairs, count)

    def gather(self, state: SlotState, rows: StepInputs) -> None:
        gather_inputs(state, rows)

    def attend(
        self,
        pool: KVPool,
        rows: StepInputs,
        tables: Tensor,
        starts: Tensor | None = None,
        num_decodes: int = 0,
        logits_indices: LogitsIndices | None = None,
        reach: int | None = None,
        longest: int | None = None,
    ) -> Attend:
        if self._fused and self._semaphores is None:
            self._semaphores = SplitSemaphores(FUSED_DECODE_MAX_ROWS * pool.shape.num_heads, pool.device)
        semaphores = self._semaphores
        return build_attention(
            pool, rows.slots, rows.positions, tables, starts, num_decodes, longest, logits_indices, reach, semaphores
        )

    def adjust(self, logits: Tensor, rows: StepInputs, logits_edits: LogitsEdits) -> None:
        penalize_logits(logits, rows.sampled_slots, rows.index, logits_edits)

    def draw(
        self,
        logits: Tensor,
        rows: StepInputs,
        params: SamplingTensors,
        tokens: Tensor,
        best: Tensor,
        adjusted: AdjustedLogits | None,
    ) -> None:
        sample_tokens(logits, rows.sampled_slots, rows.index, params, tokens, best, adjusted, self._uniform)

    def count(self, tokens: Tensor, best: Tensor, rows: StepInputs, logits_edits: LogitsEdits) -> None:
        count_tokens(tokens, best, rows.sampled_slots, logits_edits)

    def score(self, logits: Tensor, rows: StepInputs, tokens: Tensor, num_top: Tensor, out: LogprobsTensors) -> None:
        gather_logprobs(logits, rows.sampled_slots, tokens, num_top, out)

    def advance(
        self,
        state: SlotState,
        rows: StepInputs,
        tokens: Tensor,
        best: Tensor,
        eos: Tensor,
        results: Tensor,
        counts: Tensor | None,
    ) -> None:
        advance_slots(state, rows, tokens, best, eos, results, counts)
