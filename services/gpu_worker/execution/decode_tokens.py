"""Results of decode slots as arrays, in the form that the device returns."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from blockyard.services.gpu_worker.arrays import Integers
from blockyard.shared.messages import NO_TOKEN, SlotResult, SlotRun

MOST_FEW = 64  # below this many runs a dict is quicker than an array


@dataclass(slots=True)
class DecodeTokens:
    """Implements `interfaces.DecodeOutputs`. The arrays have one element for each slot."""

    slots: Integers
    token_ids: Integers
    computed: Integers  # number of tokens with KV

    def __len__(self) -> int:
        return len(self.slots)

    def to_slot_results(self) -> list[SlotResult]:
        columns = self.slots.tolist(), self.token_ids.tolist(), self.computed.tolist()
        return [SlotResult(slot, [token], computed) for slot, token, computed in zip(*columns, strict=True)]

    def token_ids_by_run(self, runs: Sequence[SlotRun]) -> bytes:
        """See `interfaces.DecodeOutputs`."""
        if len(runs) <= MOST_FEW:
            found = dict(zip(self.slots.tolist(), self.token_ids.tolist(), strict=True))
            return array("I", [found.get(run.slot, NO_TOKEN) for run in runs]).tobytes()
        slots = np.array([run.slot for run in runs])
        by_slot = np.full(slots.max() + 1, NO_TOKEN, "<u4")
        by_slot[self.slots] = self.token_ids
        token_ids: bytes = by_slot[slots].tobytes()
        return token_ids
