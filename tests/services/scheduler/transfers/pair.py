"""A world with groups of two roles, for tests of handovers between them."""

from blockyard.services.scheduler.sequences.requests import Sequence
from blockyard.shared.messages import KVRole, KVSend, SlotStart, StepPlan

from ..harness.fake_worker import FakeWorker
from ..harness.fakes import Output
from ..harness.world import Shape, World

P, D = KVRole.PREFILL, KVRole.DECODE


class Pair:
    """A world with a prefill and a decode worker."""

    def __init__(self, *roles: KVRole, **shape: object) -> None:
        self.world = World(Shape(**({"max_num_batched_tokens": 8, "max_num_seqs": 4} | shape)))
        self.gateway = self.world.add_gateway()
        self.workers = [self.world.add_worker(role) for role in roles or (P, D)]
        self.detokenizer = self.world.add_detokenizer()
        self.source, self.target = self.workers[:2]
        for worker in self.workers:
            self.work(worker)

    def submit(self, request_id: str, num_prompt: int, **more: object) -> None:
        self.world.submit(self.gateway, request_id, num_prompt, **({"max_tokens": 6} | more))

    def sequence(self, request_id: str, index: int = 0) -> Sequence:
        return self.world.core.lifecycle.requests[request_id].sequences[index]

    def output(self, request_id: str, choice: int = 0) -> Output:
        return self.gateway.journals[request_id].outputs[choice]

    def work(self, worker: FakeWorker) -> None:
        while worker.busy():
            self.world.work(worker)
        while self.detokenizer.inbox:
            self.world.detokenize(self.detokenizer)

    def notify(self) -> None:
        for worker, transfers in self.world.transfers.items():
            while transfers.notices:
                self.world.notify(worker)

    def prefill(self) -> None:
        """The source computes all it can, and no block moves."""
        self.work(self.source)

    def starts(self, worker: FakeWorker) -> list[SlotStart]:
        return [start for plan in self.plans(worker) for start in plan.starts]

    def plans(self, worker: FakeWorker) -> list[StepPlan]:
        return [o.frame for o in self.world.sent if o.to == worker.incarnation and isinstance(o.frame, StepPlan)]

    def sends(self, worker: FakeWorker) -> list[KVSend]:
        return [send for plan in self.plans(worker) for send in plan.sends]

    def frames(self, kind: type, worker: FakeWorker) -> list[object]:
        return [o.frame for o in self.world.sent if o.to == worker.incarnation and isinstance(o.frame, kind)]

    def finish(self) -> None:
        self.world.settle()
        self.world.check_outputs()
        self.world.check_idle()


def first_token(request_id: str, num_prompt: int) -> int:
    it = Pair()
    it.submit(request_id, num_prompt)
    it.prefill()
    return it.output(request_id).ids[0]
