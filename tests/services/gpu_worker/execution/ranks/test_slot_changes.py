"""When followers take over what steps have changed of their slots: as late as may be, and never too late."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from blockyard.kernels.slots.slot_state import Field, SlotState
from blockyard.services.gpu_worker.execution.ranks.slot_changes import SentChanges
from blockyard.services.gpu_worker.host_link import SameMemory
from blockyard.services.gpu_worker.parallel.commands import Followers, ReceiveChanges, TakeChanges
from blockyard.services.gpu_worker.parallel.stages import place_of
from blockyard.services.gpu_worker.parallel.team import RankGroups
from blockyard.shared.messages.base import Frame

CPU = torch.device("cpu")


class Sent:
    """The changes of a leader with some stages, whose steps are given by hand."""

    def __init__(self, num_stages: int) -> None:
        self.frames: list[Frame] = []
        group = cast(
            "Any", SimpleNamespace(device=CPU, begin_copy_from_leader=lambda tensor: None, wait=lambda work: None)
        )
        ranks = RankGroups(place_of(0, 1, num_stages), group, None, group)
        self._state = SlotState.make(16, 8, 4, CPU)
        self.changes, self._number = SentChanges(self._send, ranks, self._state, SameMemory()), 0

    def _send(self, frame: Frame, to: Followers = Followers.ALL) -> None:
        self.frames.append(frame)

    def step(
        self, decodes: Sequence[int], prefills: Sequence[int] = (), writes: Sequence[tuple[Field, int]] = ()
    ) -> int:
        """Returns the number of steps whose changes are taken over before it."""
        self._number += 1
        before, width = len(self.frames), self._state.fields.shape[1]
        index = np.array([field * width + slot for field, slot in writes], np.int32)
        self.changes.before_step(self._number, np.array(decodes, np.int64), index)
        taken = sum(one.count for one in self.frames[before:] if isinstance(one, TakeChanges))
        self.changes.after_step(self._number, np.array([*decodes, *prefills], np.int64), 8)
        assert isinstance(self.frames[-1], ReceiveChanges)
        return taken


@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_steps_of_other_slots_come_first(num_stages: int) -> None:
    sent = Sent(num_stages)
    turns = [[2 * turn, 2 * turn + 1] for turn in range(num_stages)]
    assert [sent.step(turns[i % num_stages]) for i in range(9)] == [0] * num_stages + [1] * (9 - num_stages)
    sent.changes.flush()
    assert sent.frames[-1] == TakeChanges(num_stages)


def test_a_step_takes_over_all_that_its_decodes_read() -> None:
    sent = Sent(4)
    assert [sent.step([0]), sent.step([1]), sent.step([2])] == [0, 0, 0]
    assert sent.step([1]) == 2, "in their order"
    assert sent.step([1]) == 2
    assert sent.step([5], prefills=[1]) == 0, "the next chunk of a prompt reads nothing"
    assert sent.step([6]) == 0
    assert sent.step([1]) == 2, "as a chunk the slot has got its first token"


def test_what_the_host_writes_comes_behind_earlier_steps() -> None:
    """Else a follower would keep what the slot had before it started again."""
    sent = Sent(3)
    sent.step([0, 3])
    assert sent.step([1], writes=[(Field.LIVE, 3), (Field.TEMPERATURE, 0)]) == 0, "a slot that ends is in no row"
    assert sent.step([2], writes=[(Field.POSITION, 3), (Field.LIVE, 3)]) == 1
    assert sent.step([5], writes=[(Field.NEXT, 2)]) == 2
