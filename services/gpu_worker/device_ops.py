"""What a step on the device is made of besides the model, as Triton kernels. Loaded by name, on a GPU alone."""

from typing import Protocol

from torch import Tensor

from blockyard.kernels.advance_slots import advance_slots
from blockyard.kernels.draw_tokens import DrawParams, draw_tokens
from blockyard.kernels.gather_rows import Rows, gather_rows
from blockyard.kernels.scatter_words import scatter_words
from blockyard.kernels.slot_state import SlotState
from blockyard.services.gpu_worker.kv_pool import KVPool
from blockyard.services.gpu_worker.step import Attend
from blockyard.services.gpu_worker.triton_ops import MixedAttention


class DeviceOps(Protocol):
    def scatter(self, arena: Tensor, pairs: Tensor, count: int) -> None: ...
    def gather(self, state: SlotState, rows: Rows) -> None: ...
    def attend(
        self, pool: KVPool, rows: Rows, tables: Tensor, starts: Tensor | None = None, num_decodes: int = 0
    ) -> Attend: ...
    def draw(self, logits: Tensor, rows: Rows, params: DrawParams, tokens: Tensor, best: Tensor) -> None: ...
    def advance(
        self,
        state: SlotState,
        rows: Rows,
        tokens: Tensor,
        best: Tensor,
        eos: Tensor,
        results: Tensor,
        counts: Tensor | None,
    ) -> None: ...


class TritonDeviceOps:
    """For `DeviceOps`."""

    def scatter(self, arena: Tensor, pairs: Tensor, count: int) -> None:
        scatter_words(arena, pairs, count)

    def gather(self, state: SlotState, rows: Rows) -> None:
        gather_rows(state, rows)

    def attend(
        self, pool: KVPool, rows: Rows, tables: Tensor, starts: Tensor | None = None, num_decodes: int = 0
    ) -> Attend:
        return MixedAttention(pool, rows.slots, rows.positions, tables, starts, num_decodes)

    def draw(self, logits: Tensor, rows: Rows, params: DrawParams, tokens: Tensor, best: Tensor) -> None:
        draw_tokens(logits, rows.slots, rows.index, params, tokens, best)

    def advance(
        self,
        state: SlotState,
        rows: Rows,
        tokens: Tensor,
        best: Tensor,
        eos: Tensor,
        results: Tensor,
        counts: Tensor | None,
    ) -> None:
        advance_slots(state, rows, tokens, best, eos, results, counts)
