"""Copies of blocks within a plan run in parallel: none reads a block that another one writes."""

from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from blockyard.shared.messages import BlockCopy, FinishReason, StepPlan, Stop, StreamRef, TokenStep

from ..conftest import Ring
from ..harness.program import BYTES_PER_STEP, SHAPES, Program
from ..harness.world import Shape, World

PROMPT = [(i * 7 + 1) % 50 for i in range(22)]  # a prompt that ends within a block of 4
EVENTS = 160  # steps of one history
HISTORIES = 500 if settings.get_current_profile_name() == "long" else 25
LEAST = HISTORIES // 2  # plans with several copies, in all histories: a tenth of what most runs have
FORKS = SHAPES | {
    "block_size": [2, 3, 5],
    "num_blocks": list(range(14, 40)),
    "max_num_seqs": list(range(3, 9)),
    "max_num_batched_tokens": list(range(8, 40)),
    "max_queue_len": [100],
    "max_queue_tokens": [10_000],
    "max_queue_delay_s": [None],
    "pooling": [""],  # vectors have no choices
}

shapes = st.builds(Shape, **{name: st.sampled_from(values) for name, values in FORKS.items()})
counted: Counter[str] = Counter()


def copies_of(world: World) -> list[list[BlockCopy]]:
    """The copies of all plans that were sent, in order."""
    return [o.frame.copies for o in world.sent if isinstance(o.frame, StepPlan) and o.frame.copies]


def check_copies(world: World) -> None:
    """The contract of BlockCopy. The mock worker checks the contents of the sources."""
    for copies in copies_of(world):
        written_prompts = [copy.dst for copy in copies]
        assert len(set(written_prompts)) == len(written_prompts), f"a block is written twice: {copies}"
        assert {copy.src for copy in copies}.isdisjoint(written_prompts), (
            f"a copy reads what another one writes: {copies}"
        )


def stops_together(step: TokenStep) -> bool:
    """Most choices of every other request stop at the same token, so that many slots become free at once."""
    number = int(step.request_id)
    return number % 2 == 0 and step.choice % 3 > 0 and step.first == 2 + number % 5


class ForkProgram(Program):
    """Histories of requests with several choices on two workers. Sometimes one worker is lost."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.world.add_worker()
        self.world.stops = stops_together
        for detokenizer in self.world.detokenizers.values():
            detokenizer.stops = stops_together
        self._rules = [self.work, self.fork, self.work, self.detokenize, self.work, self.detokenize] * 6
        self._rules += [self.kill_worker, self.add_worker, self.add_worker, self.resubmit, self.cancel, self.submit]

    def fork(self, a: int, b: int) -> None:
        """Three to eight choices; a prompt that may end anywhere within a block."""
        gateway = next(iter(self.world.gateways.values()))
        self.num_requests += 1
        num_prompt = 2 + a % 13
        prompt = self._prompt(a, b, num_prompt)
        self.world.submit(
            gateway, str(self.num_requests), num_prompt, 3 + b % 6, prompt=prompt, max_tokens=4 + b % 16, seed=a
        )


def end(it: Ring, request_id: str, *choices: int) -> None:
    """The stop strings of these choices are found in one batch of text."""
    it.world.detokenize(it.detokenizer)
    for choice in choices:
        del it.detokenizer.streams[request_id, choice]
        it.output(request_id, choice).finish = FinishReason.STOP
    it.world.tell(it.detokenizer.incarnation, Stop([StreamRef(request_id, 0, choice) for choice in choices]))


@pytest.mark.parametrize("named", [True, False])
def test_choices_of_a_lost_worker_join_one_that_runs(ring: type[Ring], named: bool) -> None:
    """Both start with the same plan: the second must not copy a block that is a copy for the first."""
    it = ring(depth=0, max_num_seqs=3, max_num_batched_tokens=64, prefix_caching=named)
    other = it.world.add_worker()
    it.submit("a", 0, n=6, prompt=PROMPT, max_tokens=40)
    for _ in range(12):
        for worker in (it.worker, other):
            it.world.work(worker)
        it.world.detokenize(it.detokenizer)
    before = len(copies_of(it.world))
    it.world.kill(it.worker.incarnation)
    it.worker = other
    end(it, "a", 3, 5)
    it.finish()
    check_copies(it.world)
    together = [copies for copies in copies_of(it.world)[before:] if len(copies) > 1]
    assert together, "no two of them began with the same plan"
    assert all(len({copy.src for copy in copies}) == 1 for copies in together)


@pytest.mark.timeout(20 * HISTORIES)
@settings(
    max_examples=HISTORIES,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # shrinking a failure takes minutes
)
@given(shapes, st.binary(min_size=EVENTS * BYTES_PER_STEP, max_size=EVENTS * BYTES_PER_STEP))
def test_random_histories_keep_the_invariants(shape: Shape, data: bytes) -> None:
    program = ForkProgram(shape)
    try:
        program.run(data)
        check_copies(program.world)
    finally:
        counted["plans"] += program.world.num_steps
        counted["with several copies"] += sum(len(copies) > 1 for copies in copies_of(program.world))


def test_the_number_of_plans_with_copies() -> None:
    """Runs after the test above, which may have been deselected."""
    if not counted:
        pytest.skip("the histories were not run")
    assert counted["with several copies"] >= LEAST, counted
