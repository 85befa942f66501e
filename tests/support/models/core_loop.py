"""The scheduler's core and a model's runner, connected only by a queue of plans."""

from array import array
from collections import deque
from collections.abc import Sequence

from plan_driver import as_bytes
from token_rows import steps_of

from blockyard.services.gpu_worker.runner import Runner
from blockyard.services.gpu_worker.service import packed
from blockyard.services.scheduler.batch.worker_groups import BatchLimits
from blockyard.services.scheduler.core import Scheduler, SchedulerSettings
from blockyard.shared.messages import (
    Attach,
    Attached,
    ChoiceState,
    FinishReason,
    Generate,
    Member,
    Role,
    Sampling,
    Stats,
    StepPlan,
    StepResult,
    StreamOpen,
    TextOptions,
    TokenBatch,
    TokenLogprobs,
)

ME, WORKER, DETOKENIZER, GATEWAY, MORE = 1, 2, 3, 4, 5


class CoreLoop:
    """Runs requests on real runners; `outputs` by request and choice. A small pool makes it preempt, or swap
    if there is host memory for blocks.

    `more` are the runners of further worker groups.
    """

    def __init__(
        self,
        runner: Runner,
        depth: int = 1,
        max_num_seqs: int = 8,
        chunk: int = 64,
        more: Sequence[Runner] = (),
        **settings: object,
    ) -> None:
        self.runner = runner
        self.runners = {WORKER: runner} | {MORE + i: other for i, other in enumerate(more)}
        self.plans = deque[tuple[int, StepPlan]]()
        self.attaches: dict[int, Attach] = {}  # the last one of each worker
        self.most_launched = 0  # plans launched before the first of them was done, at most
        self.num_plans = dict.fromkeys(self.runners, 0)
        self.outputs: dict[tuple[str, int], list[int]] = {}
        self.streams: dict[int, StreamOpen] = {}
        self.finishes: dict[tuple[str, int], tuple[FinishReason, int | None]] = {}
        self.logprobs: dict[tuple[str, int], list[TokenLogprobs]] = {}
        self.prompt_logprobs: dict[tuple[str, int], list[TokenLogprobs]] = {}  # from position 1
        batch = self._batch = BatchLimits(max_num_seqs, chunk, depth)
        self.core = Scheduler(
            ME,
            SchedulerSettings(
                names=["m"], root="", batch=batch, max_queue_len=10**6, max_queue_tokens=10**9, **settings
            ),
            0,
        )
        self.groups, self.lifecycle = self.core.worker_groups, self.core.lifecycle
        self.core.on_member(Member("detokenizer", Role.DETOKENIZER, DETOKENIZER, "", ready=True), 0.0)
        for worker in self.runners:
            self._attach(worker)

    def add(
        self, request_id: str, prompt: list[int], sampling: Sampling, n: int | Sequence[int] = 1, **more: object
    ) -> None:
        """`n` is the number of choices, or their indexes."""
        choices = [ChoiceState(i) for i in (range(n) if isinstance(n, int) else n)]
        frame = Generate(request_id, 0, "m", as_bytes(prompt), b"", sampling, TextOptions(), choices, **more)
        self.core.on_message(GATEWAY, frame, 0.0)

    def run(self) -> Stats:
        """Runs until no plan is left."""
        self.turn()
        while self.plans:
            self.step()
        stats = self.core.stats()
        assert (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0)
        return stats

    def lose(self, worker: int, again: bool = True) -> None:
        """A worker group dies with its plans and its KV. If `again`, it attaches again at once."""
        self.plans = deque((to, plan) for to, plan in self.plans if to != worker)
        self.core.on_member_lost(worker)
        self.runners[worker].reset(0)
        self.runners[worker].reset_prefix_cache()
        if again:
            self._attach(worker)
        self.turn()

    def _attach(self, worker: int) -> None:
        self.core.on_member(Member("gpu_worker", Role.GPU_WORKER, worker, "", ready=True), 0.0)
        self.turn()
        attach, one = self.attaches[worker], self.runners[worker]
        one.reset(self._batch.num_slots)
        held, host = one.block_hashes.blocks_and_hashes(), one.block_hashes.host_blocks_and_hashes()
        answer = Attached(ME, one.geometry, *held, *host, number=attach.number)
        self.core.on_message(worker, answer, 0.0)

    def step(self) -> None:
        """Runs and answers the oldest plan, and the next plans that its worker can launch before it is done."""
        worker, plan = self.plans.popleft()
        runner, launched = self.runners[worker], [plan]
        runner.launch(plan)
        while self.plans and self.plans[0][0] == worker and runner.can_launch():
            launched.append(self.plans.popleft()[1])
            runner.launch(launched[-1])
        self.most_launched = max(self.most_launched, len(launched))
        done = [*runner.collect()]
        while len(done) < len(launched):
            done += runner.collect()
        for one, it in zip(launched, done, strict=True):
            self.num_plans[worker] += 1
            slots, token_ids, logprobs = packed(it)
            times = (0.0, 0.0, it.failed_fetches, token_ids, 0.0)
            result = StepResult(one.number, slots, *times, logprobs)
            self.core.on_message(worker, result, 0.0)
            self.turn()

    def turn(self) -> None:
        for outgoing in self.core.step(0.0):
            frame = outgoing.frame
            if isinstance(frame, StepPlan):
                self.plans.append((outgoing.to, frame))
            elif isinstance(frame, Attach):
                self.attaches[outgoing.to] = frame
            elif isinstance(frame, TokenBatch):
                for step in steps_of(frame, self.streams):
                    assert not step.detail, step.detail
                    ids = self.outputs.setdefault((step.request_id, step.choice), [])
                    assert step.first == len(ids)
                    ids += array("I", step.token_ids)
                    self.logprobs.setdefault((step.request_id, step.choice), []).extend(step.logprobs)
                    if step.prompt_logprobs:
                        scored = self.prompt_logprobs.setdefault((step.request_id, step.choice), [])
                        assert step.first_prompt == len(scored) + 1
                        scored += step.prompt_logprobs
                    if step.finish is not None:
                        self.finishes[step.request_id, step.choice] = (step.finish, step.stop_token)
