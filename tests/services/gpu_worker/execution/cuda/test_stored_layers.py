"""Words of layers in CUDA graphs, over a model of one CUDA stream: launches are queued, and the device runs behind."""

from collections import deque
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from reference_ops import ReferenceOps
from torch import Tensor

from blockyard.services.gpu_worker.execution.cuda.cuda_steps import sends_prefills
from blockyard.services.gpu_worker.execution.cuda.stored_layers import LayerWords, layer_groups
from blockyard.services.gpu_worker.host_link import SameMemory
from blockyard.services.gpu_worker.interfaces import StoredLayers
from blockyard.shared.config.services.process import BusConfig, ProcessConfig
from blockyard.shared.config.services.worker import KVTransferConfig, WorkerConfig
from blockyard.shared.messages import KVRole

LAYERS = 5


class QueuedOps(ReferenceOps):
    """Queues what a device does later."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: deque[Callable[[], None]] = deque()

    def record_step(self, step: Tensor, words: Tensor, index: int) -> None:
        self.queue.append(lambda: super(QueuedOps, self).record_step(step, words, index))


class Device:
    """Runs steps on one stream. `stored` has the layers that a step has stored, by the number of the step."""

    def __init__(self, num_groups: int, first: int) -> None:
        self.stored: dict[int, set[int]] = {}
        self.launched = first
        self._ops, self._step = QueuedOps(), torch.zeros(1, dtype=torch.int32)
        self.words = LayerWords(layer_groups(LAYERS, num_groups), self._ops, self._step, SameMemory())
        self.launch(first)
        self.run()

    def launch(self, number: int, is_graph: bool = True) -> None:
        """A step that is no graph writes no words."""
        self.stored[number] = set()
        self._ops.queue.append(lambda: self._begin(number))

        def attend(layer: int, *_: object) -> None:
            self._ops.queue.append(lambda: self.stored[number].add(layer))

        forward = self.words.around(attend) if is_graph else attend  # type: ignore[arg-type]
        for layer in range(LAYERS):
            forward(layer, None)  # type: ignore[arg-type]

    def run(self, count: int | None = None) -> None:
        """Runs so many of the operations in the queue; None: all."""
        for _ in range(len(self._ops.queue) if count is None else min(count, len(self._ops.queue))):
            self._ops.queue.popleft()()

    def _begin(self, number: int) -> None:
        self._step.numpy().view(np.uint32)[0] = number % 2**32


Action = st.one_of(st.sampled_from(["graph", "eager", "trial"]), st.integers(1, 30))


@example(actions=["graph", 30, "graph", "eager", 1], groups=8, first=2**31 - 2)
@example(actions=["graph", 30, "graph", "eager", 1], groups=8, first=2**32 - 2)
@given(
    actions=st.lists(Action, max_size=30),
    groups=st.sampled_from([1, 2, 3, 8]),
    first=st.sampled_from([0, 2**31 - 2, 2**32 - 2, 2**33 + 2**31 - 2]),
)
def test_layers_count_as_stored_when_they_are(actions: list[str | int], groups: int, first: int) -> None:
    """Not earlier, whichever steps and trials write the same words; and at the end of the step at the latest."""
    device = Device(groups, first)
    steps: dict[int, list[StoredLayers]] = {}
    for action in actions:
        if isinstance(action, int):
            device.run(action)
        elif action == "trial":  # has the number of the last step, which is done
            device.run()
            device.launch(device.launched)
            device.run()
        else:
            device.launched += 1
            device.launch(device.launched, action == "graph")
            if action == "graph":
                steps[device.launched] = device.words.stored(device.launched)
        for number, stored in steps.items():
            assert [layer for group in stored for layer in group.layers] == list(range(LAYERS))
            for group in stored:
                if group.is_stored():
                    assert device.stored[number] >= set(group.layers)
    device.run()
    assert all(group.is_stored() for stored in steps.values() for group in stored)


def test_layers_are_stored_one_after_another_while_the_step_runs() -> None:
    device = Device(LAYERS, 0)
    for number in (1, 2):
        device.launch(number)
        stored = device.words.stored(number)
        device.run(1)  # the step begins
        assert not any(group.is_stored() for group in stored)
        for num in range(1, LAYERS + 1):
            device.run(1)
            assert not stored[num - 1].is_stored(), "the layer is stored, its word is not written"
            device.run(1)
            assert [group.is_stored() for group in stored] == [True] * num + [False] * (LAYERS - num)


@pytest.mark.parametrize(
    ("layers", "most", "sizes"),
    [(1, None, [1]), (8, None, [1] * 8), (9, None, [2, 2, 2, 2, 1]), (36, None, [5] * 7 + [1]), (36, 36, [1] * 36)],
)
def test_groups_have_all_layers(layers: int, most: int | None, sizes: list[int]) -> None:
    groups = layer_groups(layers, most)
    assert [len(group) for group in groups] == sizes
    assert [layer for group in groups for layer in group] == list(range(layers))


@pytest.mark.parametrize(
    ("transfers", "expected"),
    [
        (None, False),
        (KVTransferConfig(role=KVRole.PREFILL), True),
        (KVTransferConfig(role=KVRole.BOTH), True),
        (KVTransferConfig(role=KVRole.DECODE), False),
    ],
)
def test_graphs_record_layers_on_workers_whose_role_sends(transfers: KVTransferConfig | None, expected: bool) -> None:
    process = ProcessConfig(name="worker", bus=BusConfig(registry="ipc:///unused", bind="ipc:///unused"))
    assert sends_prefills(WorkerConfig(process=process, model_path="/nowhere", kv_transfer=transfers)) is expected
