from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from blockyard.services.gpu_worker.loading import sleep

from .harness.fakes import FakeDetokenizer, FakeGateway, Journal, Output
from .harness.world import FakeWorker, Shape, World


@pytest.fixture(autouse=True, scope="module")
def no_garbage_collection() -> Iterator[None]:
    """A worker that starts to sleep collects garbage, which takes a second in a process that imported all tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sleep, "gc", SimpleNamespace(collect=lambda: 0, unfreeze=lambda: None))
        yield


class Ring:
    """A world with one gateway, worker and detokenizer, attached and ready."""

    def __init__(self, **shape: object) -> None:
        self.world = World(Shape(**shape))
        self.gateway: FakeGateway = self.world.add_gateway()
        self.worker: FakeWorker = self.world.add_worker()
        self.detokenizer: FakeDetokenizer = self.world.add_detokenizer()
        self.world.settle()

    def submit(self, request_id: str, num_prompt: int, n: int = 1, **more: object) -> None:
        self.world.submit(self.gateway, request_id, num_prompt, n, **more)

    def journal(self, request_id: str) -> Journal:
        return self.gateway.journals[request_id]

    def output(self, request_id: str, choice: int = 0) -> Output:
        return self.journal(request_id).outputs[choice]

    def steps(self, count: int) -> None:
        """The worker answers `n` plans, and the detokenizer handles all of their text."""
        until = self.world.num_steps + count
        while self.world.num_steps < until:
            assert self.worker.busy(), "nothing to do"
            self.world.work(self.worker)
            while self.detokenizer.inbox:
                self.world.detokenize(self.detokenizer)

    def finish(self) -> None:
        """Runs until all requests end, then checks their outputs and that nothing is left."""
        self.world.settle()
        self.world.check_outputs()
        self.world.check_idle()


@pytest.fixture
def ring() -> type[Ring]:
    return Ring
