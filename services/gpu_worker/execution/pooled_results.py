"""Pooled results as those of slots."""

from collections.abc import Mapping

from blockyard.services.gpu_worker.pooling.output import PooledResults
from blockyard.services.gpu_worker.slots import NOT_FINITE
from blockyard.shared.messages import FinishReason, SlotResult

PROBLEM = NOT_FINITE.cause.replace("logits", "vectors")


def to_slot_results(pooled: PooledResults, lengths: Mapping[int, int]) -> list[SlotResult]:
    """Returns the finished slots of a step that is done. lengths: tokens of each slot.

    A slot with numbers that are not finite fails.
    """
    bad = pooled.not_finite()
    found = []
    for slot, data in zip(pooled.slots, pooled.to_bytes(), strict=True):
        if slot in bad:
            found.append(SlotResult(slot, [], lengths[slot], FinishReason.FAILED, detail=PROBLEM))
        else:
            found.append(SlotResult(slot, [], lengths[slot], FinishReason.STOP, vector=data))
    return found
