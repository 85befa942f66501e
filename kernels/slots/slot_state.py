"""State of batch slots on the device, inputs of a step, and what it did to its slots. Imports no Triton.

The state is one arena of 32-bit words, updated by scattered writes.

`fields` has one row for each field and a column for each slot; `row_slots` has the slot of each row of the step;
`tables` are the block tables. The host sends all changes of a plan as pairs (index in the arena, value), which one
kernel writes.
"""

from dataclasses import dataclass
from enum import IntEnum, auto

import torch
from torch import Tensor

from blockyard.kernels.tensor_checks import check_tensor

MAX_STOP_IDS = 8  # stop ids a slot; the host handles slots with more
MAX_TOKEN_EDITS = 64  # biased or banned tokens a slot; the host handles slots with more
NUM_INPUT_WORDS = 5  # int64 fields of StepInputs
NUM_RESULTS = 3  # words a row: outcome, token, number of computed tokens


class Field(IntEnum):
    """Index of a slot's field in `SlotState.fields`. Floats are stored by their bits."""

    NEXT = 0  # id of the token to be computed next
    POSITION = 1  # number of computed tokens: their KV is written
    KNOWN = 2  # number of tokens with known ids
    MAX_KNOWN = 3  # number of tokens at max_tokens or max_model_len
    LIVE = 4
    IGNORE_EOS = 5
    NUM_STOPS = 6
    TEMPERATURE = 7
    TOP_K = 8
    TOP_P = 9
    MIN_P = 10
    KEY = 11  # two words
    CHOICE = 13
    EDITS_ROW = 14  # row of the token counts and adjusted logits, below 0: none
    REPETITION = 15
    PRESENCE = 16
    FREQUENCY = 17
    ONLY_LISTED = 18
    NUM_LISTED = 19
    NUM_TOP = 20  # top log-probabilities to report, below 0: no log-probabilities
    AWAITS_HOST = 21  # the host samples its tokens: see SlotOutcome.WAITING
    LOGITS_ROW = 22  # row of the logits that the host reads, below 0: it reads none of this step
    MASK_OWNER = 23  # owner of its masks of structured output, see `MaskTensors`; 0: none on the device
    MASK_LATE = 24  # not 0: its last step found no mask in time, see `wait_for_masks`
    ADAPTER = 25  # place of its adapter plus one; 0: it has none
    STOPS = 26  # the first of MAX_STOP_IDS


NUM_FIELDS = Field.STOPS + MAX_STOP_IDS
CHANGED_FIELDS = (Field.NEXT, Field.POSITION, Field.KNOWN, Field.LIVE)  # those that `advance_slots` writes
NUM_CHANGE_WORDS = 1 + len(CHANGED_FIELDS)  # a row of `collect_changes`: the slot, below 0: none, and these fields


@dataclass(frozen=True, slots=True)
class SlotState:
    """Views of one arena, in the arena's order."""

    arena: Tensor  # [words] int32
    fields: Tensor  # [NUM_FIELDS, num_slots]
    row_slots: Tensor  # [capacity] slot of each row, below 0: a padding row
    step: Tensor  # [1] number of steps that have begun, modulo 2**32
    tables: Tensor  # [num_slots, width] block ids
    listed: Tensor  # [num_slots, MAX_TOKEN_EDITS] token ids
    bias: Tensor  # [num_slots, MAX_TOKEN_EDITS], floats
    until: Tensor  # [num_slots, 2 * MAX_TOKEN_EDITS], int64 in two words

    @classmethod
    def make(cls, num_slots: int, capacity: int, width: int, device: torch.device) -> "SlotState":
        """All rows are padding, no slot is live. Sizes are rounded up so that every view is aligned."""
        num_slots, width = -(-num_slots // 16) * 16, -(-width // 16) * 16
        padded = -(-capacity // 16) * 16
        lists = num_slots * MAX_TOKEN_EDITS
        sizes = [NUM_FIELDS * num_slots, padded, 16, num_slots * width, lists, lists, 2 * lists]
        arena = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        fields, row_slots, step, tables, listed, bias, until = torch.split(arena, sizes)
        row_slots.fill_(-1)
        return cls(
            arena,
            fields.view(NUM_FIELDS, num_slots),
            row_slots[:capacity],
            step[:1],
            tables.view(num_slots, width),
            listed.view(num_slots, -1),
            bias.view(num_slots, -1),
            until.view(num_slots, -1),
        )

    def floats(self, field: Field) -> Tensor:
        """[num_slots] float32."""
        return self.fields[field].view(torch.float32)

    def offset(self, view: Tensor) -> int:
        """Index in the arena of a view's first element."""
        return int(view.storage_offset())

    def check(self) -> None:
        """Raises ValueError."""
        for name in ("arena", "fields", "row_slots", "step", "tables"):
            one: Tensor = getattr(self, name)
            if one.dtype != torch.int32 or not one.is_contiguous():
                raise ValueError(f"{name}: expected contiguous int32, got {one.dtype}, strides {one.stride()}")
        if self.fields.shape[0] != NUM_FIELDS or self.fields.shape[1] != self.tables.shape[0]:
            raise ValueError(f"fields {list(self.fields.shape)} and tables {list(self.tables.shape)} do not fit")


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Inputs of a step, [rows] int64 each."""

    token_ids: Tensor
    positions: Tensor
    slots: Tensor  # below 0: a padding row, or a slot that has ended
    index: Tensor  # index in its sequence of the token to be sampled
    sampled_slots: Tensor  # the slot, below 0 also where the next token is known already

    @classmethod
    def make(cls, capacity: int, device: torch.device) -> "StepInputs":
        return cls(
            *torch.zeros((NUM_INPUT_WORDS, -(-capacity // 2) * 2), dtype=torch.int64, device=device)[:, :capacity]
        )

    def first(self, rows: int) -> "StepInputs":
        return StepInputs(
            *(one[:rows] for one in (self.token_ids, self.positions, self.slots, self.index, self.sampled_slots))
        )

    def check(self, rows: int) -> None:
        """Raises ValueError."""
        for name in ("token_ids", "positions", "slots", "index", "sampled_slots"):
            check_tensor(name, getattr(self, name), (rows,), torch.int64)


class SlotOutcome(IntEnum):
    """The outcome of a step for a row's slot."""

    NOTHING = 0  # a padding row, or the slot had ended before
    PART = auto()  # not all known tokens are computed yet
    TOKEN = auto()
    END_OF_SEQUENCE = auto()  # comes with a token, as do STOP and LENGTH
    STOP = auto()
    LENGTH = auto()
    FULL = auto()  # at its maximum length, no token was sampled
    NOT_FINITE = auto()
    NONE_ALLOWED = auto()
    WAITING = auto()  # no token: the next step computes the last known token again and writes the same KV


WITH_TOKEN = (SlotOutcome.TOKEN, SlotOutcome.END_OF_SEQUENCE, SlotOutcome.STOP, SlotOutcome.LENGTH)
