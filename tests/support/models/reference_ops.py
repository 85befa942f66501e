"""The steps of a GPU with its operations in plain torch, in host memory, and an event that becomes ready late."""

import random

from torch import Tensor

from blockyard.kernels.attention.latent.head_products import head_products_reference
from blockyard.kernels.attention.latent.latent_decode import latent_decode_reference
from blockyard.kernels.attention.latent.write_latent import write_latent_reference
from blockyard.kernels.attention.paged_decode import PagedKVMetadata, paged_decode_reference
from blockyard.kernels.kv_cache.rope_write_kv import rope_write_kv_reference
from blockyard.kernels.layers.rms_norm import RMSNorm
from blockyard.kernels.sampling.sample_tokens import sample_tokens_reference
from blockyard.kernels.sampling.sampling_references import (
    copy_logits_reference,
    count_tokens_reference,
    gather_logprobs_reference,
    penalize_logits_reference,
    publish_sampled_reference,
    wait_for_masks_reference,
)
from blockyard.kernels.sampling.sampling_state import (
    AdjustedLogits,
    LogitsEdits,
    LogprobsTensors,
    MaskState,
    RowMasks,
    SamplingTensors,
)
from blockyard.kernels.slots.record_step import record_step_reference
from blockyard.kernels.slots.slot_references import (
    advance_slots_reference,
    collect_changes_reference,
    gather_inputs_reference,
    scatter_words_reference,
    write_changes_reference,
)
from blockyard.kernels.slots.slot_state import SlotState, StepInputs
from blockyard.services.gpu_worker.attention.metadata import AttentionMetadata
from blockyard.services.gpu_worker.execution.cuda.cuda_steps import CudaSteps
from blockyard.services.gpu_worker.execution.cuda.decode_graphs import (
    IN_FLIGHT,
    DecodeSettings,
    DecodeSteps,
    num_mask_slots,
)
from blockyard.services.gpu_worker.execution.cuda.device_masks import share_masks
from blockyard.services.gpu_worker.execution.cuda.device_ops import DeviceOps
from blockyard.services.gpu_worker.execution.pinned_ring import PinnedRing
from blockyard.services.gpu_worker.execution.ranks.leader import DeviceMirror
from blockyard.services.gpu_worker.kv.pool import KVPool
from blockyard.services.gpu_worker.runner import Runner
from blockyard.services.gpu_worker.step import LatentRows, LogitsIndices

NEAR = 8  # keys


class ReferenceAttention:
    def __init__(self, pool: KVPool, seqs: PagedKVMetadata, logits_indices: LogitsIndices | None = None) -> None:
        self._pool, self._seqs, self._logits_indices = pool, seqs, logits_indices

    def of_rows(self, indices: LogitsIndices) -> "ReferenceAttention":
        return ReferenceAttention(self._pool, self._seqs, indices)

    def __call__(self, layer: int, qkv: Tensor, rotation: Tensor | None = None, norm: RMSNorm | None = None) -> Tensor:
        memory = self._pool.layers[layer]
        weight, eps = (norm.weight, norm.eps) if norm is not None else (None, 0.0)
        rope_write_kv_reference(qkv, memory, self._seqs, rotation, weight, eps)
        attention = self._pool.shape.attention[layer]
        q, seqs, logits_indices = qkv[:, : attention.num_heads].contiguous(), self._seqs, self._logits_indices
        if logits_indices is not None:
            q, seqs = (
                q[logits_indices.rows],
                PagedKVMetadata(logits_indices.slots, logits_indices.positions, seqs.tables),
            )
        return paged_decode_reference(q, memory, seqs, attention.rules)

    def latent(self, layer: int, query: Tensor, rotation: Tensor | None, latent: LatentRows) -> Tensor:
        pool, memory, seqs, indices = self._pool, self._pool.layers[layer], self._seqs, self._logits_indices
        write_latent_reference(query, latent.rows, memory, seqs, rotation, latent.norm.weight, latent.norm.eps)
        if indices is not None:
            query, seqs = query[indices.rows], PagedKVMetadata(indices.slots, indices.positions, seqs.tables)
        plain, of_step = query[..., : latent.plain_dim], None if indices is None else indices.rows
        absorbed = head_products_reference(plain, latent.to_keys)
        if latent.adapted is not None:
            latent.adapted.add_to_queries(absorbed, plain, of_step)
        rotated = query[..., latent.plain_dim :]
        out = latent_decode_reference(absorbed, rotated, memory, seqs, pool.shape.attention[layer].rules)
        values = head_products_reference(out, latent.to_values)
        if latent.adapted is not None:
            latent.adapted.add_to_values(values, out, of_step)
        return values.flatten(1)


class ReferenceOps(DeviceOps):
    """The operations of a step, computed by the kernels' references."""

    def fused_decode_max_len(self, rows: int) -> int:
        return NEAR if rows == 1 else 0

    def scatter(self, arena: Tensor, pairs: Tensor, count: int) -> None:
        assert len(set(pairs[0, :count].tolist())) == count, "no place may be written twice"
        scatter_words_reference(arena, pairs, count)

    def gather_inputs(self, state: SlotState, inputs: StepInputs) -> None:
        gather_inputs_reference(state, inputs)

    def collect_changes(self, state: SlotState, slots: Tensor, changes: Tensor) -> None:
        collect_changes_reference(state, slots, changes)

    def write_changes(self, state: SlotState, changes: Tensor) -> None:
        write_changes_reference(state, changes)

    def record_step(self, step: Tensor, words: Tensor, index: int) -> None:
        record_step_reference(step, words, index)

    def attend(self, pool: KVPool, metadata: AttentionMetadata) -> ReferenceAttention:
        rows, starts, longest = metadata.rows, metadata.query_start_loc, metadata.max_seq_len
        num_decodes, longest_prefill = metadata.num_decodes, metadata.prefill_max_seq_len
        assert longest is None or int(rows.positions.max()) < longest
        if starts is not None:
            assert (int(starts[0]), int(starts[-1])) == (num_decodes, len(rows.slots))
            assert longest_prefill is None or int(rows.positions[num_decodes:].max()) < longest_prefill
        return ReferenceAttention(pool, rows)

    def wait_for_masks(self, inputs: StepInputs, rows: RowMasks) -> None:
        wait_for_masks_reference(inputs.sampled_slots, inputs.index, rows.masks, rows.states, rows.words)

    def publish_sampled(self, tokens: Tensor, best: Tensor, inputs: StepInputs, rows: RowMasks) -> None:
        publish_sampled_reference(tokens, best, inputs.sampled_slots, inputs.index, rows.masks, rows.states)

    def penalize(self, logits: Tensor, inputs: StepInputs, edits: LogitsEdits, masked: RowMasks | None) -> None:
        penalize_logits_reference(logits, inputs.sampled_slots, inputs.index, edits, masked)

    def sample(
        self,
        logits: Tensor,
        inputs: StepInputs,
        params: SamplingTensors,
        tokens: Tensor,
        best: Tensor,
        adjusted: AdjustedLogits | None,
    ) -> None:
        if adjusted is not None:
            logits = logits.clone()
            for place, slot in enumerate(inputs.sampled_slots.tolist()):
                row = int(adjusted.row[slot]) if slot >= 0 else -1
                if row >= 0:
                    logits[place] = adjusted.logits[row]
        drawn, won = sample_tokens_reference(logits, inputs.sampled_slots, inputs.index, params)
        tokens.copy_(drawn)
        best.copy_(won)

    def count_tokens(self, tokens: Tensor, best: Tensor, ready: Tensor, inputs: StepInputs, edits: LogitsEdits) -> None:
        count_tokens_reference(tokens, best, ready, inputs.sampled_slots, edits)

    def copy_logits(self, logits: Tensor, inputs: StepInputs, row: Tensor, out: Tensor) -> None:
        copy_logits_reference(logits, inputs.sampled_slots, row, out)

    def gather_logprobs(
        self, logits: Tensor, slots: Tensor, tokens: Tensor, num_top: Tensor, out: LogprobsTensors
    ) -> None:
        gather_logprobs_reference(logits, slots, tokens, num_top, out)

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
        advance_slots_reference(state, inputs, tokens, best, ready, eos, results, counts)


class WaitingOps(ReferenceOps):
    """Lets random rows wait, as if their masks came late."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self._rng = rng
        self.ready: Tensor | None = None  # of the steps that use it

    def wait_for_masks(self, inputs: StepInputs, rows: RowMasks) -> None:
        super().wait_for_masks(inputs, rows)
        for row in range(len(rows.states)):
            if self._rng.random() < 0.3:
                rows.states[row] = MaskState.MISSING

    def sample(
        self,
        logits: Tensor,
        inputs: StepInputs,
        params: SamplingTensors,
        tokens: Tensor,
        best: Tensor,
        adjusted: AdjustedLogits | None,
    ) -> None:
        super().sample(logits, inputs, params, tokens, best, adjusted)
        assert self.ready is not None
        for row in range(len(tokens)):
            self.ready[row] = self._rng.random() < 0.7


class SlowMark:
    """An event that is ready only after several queries."""

    def __init__(self, rng: random.Random) -> None:
        self._rng, self._left = rng, 0

    def record(self) -> None:
        self._left = self._rng.randrange(4)

    def query(self) -> bool:
        self._left -= 1
        return self._left < 0

    def synchronize(self) -> None:
        self._left = 0


def run_ahead(
    runner: Runner,
    capacity: int,
    seed: int = 0,
    logits_edits: bool = True,
    waits: bool = False,
    records_layers: bool = True,
    masks: bool = True,
    ops: ReferenceOps | None = None,
    mirror: DeviceMirror | None = None,
    ring: PinnedRing | None = None,
) -> CudaSteps:
    """Gives a runner on the CPU the steps of a GPU.

    waits: random rows get no token in a step. masks: the device reads masks.
    """
    rng, shape, link = random.Random(seed), runner.geometry, runner.model.table.link
    ring = ring or PinnedRing(IN_FLIGHT, capacity, link, lambda: SlowMark(rng))
    settings = DecodeSettings(
        capacity=capacity,
        max_model_len=shape.max_model_len,
        eos_token_ids=shape.eos_token_ids,
        logits_edits=logits_edits,
        num_extra_tokens=shape.num_extra_tokens,
        masks=share_masks(runner.batch.matchers, num_mask_slots(capacity), shape.vocab_size, link) if masks else None,
    )
    ops = ops or (WaitingOps(rng) if waits else ReferenceOps())
    decodes = DecodeSteps(runner.model, runner.pool, settings, ops, ring, mirror)
    if isinstance(ops, WaitingOps):
        ops.ready = decodes.ready
    steps = CudaSteps(decodes, runner.batch, shape.max_num_batched_tokens, records_layers=records_layers)
    runner.use(steps)
    return steps
