"""Constrained sequences on real models: the text is inside the grammar and does not depend on scheduling or kills."""

import os
import signal
import time
from collections.abc import Iterator

import fake_grammar_engine
import msgspec
import pytest
from core_loop import CoreLoop
from equality import CONDITIONS, Bench, Request, requests
from fake_grammar_engine import constraint
from plan_driver import Driver
from reference_ops import run_ahead
from ties import Ties
from tiny_models import BY_NAME, VOCAB, start

from blockyard.services.gpu_worker.runner import Runner
from blockyard.services.gpu_worker.structured_output import matcher_client
from blockyard.shared.messages import FinishReason, Sampling, Stats

EOS, LENGTH = 1, 24


@pytest.fixture(scope="module")
def fake_engine() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matcher_client, "COMMAND", fake_grammar_engine.COMMAND)
        yield


@pytest.fixture(scope="module")
def it(fake_engine: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    bench = Bench(tmp_path_factory.mktemp("tiny"), batch_invariant=True)
    yield bench
    for runner in (bench.roomy, bench.second, bench.small, bench.swapping):
        close(runner)


def close(runner: Runner) -> None:
    assert runner.batch.matchers is not None
    runner.batch.matchers.close()


def constrained(some: list[Request]) -> list[Request]:
    """Every fourth has no constraint, every other fourth a marker with a budget."""
    plain = constraint(modulus=3, length=LENGTH)
    kinds = [plain, constraint(begin_after=[8], budget=5, modulus=3, length=LENGTH), plain, None]
    return [
        Request(one.name, one.prompt, msgspec.structs.replace(one.sampling, constraint=kinds[i % 4]), one.n)
        for i, one in enumerate(some)
    ]


def is_inside(output: list[int], sampling: Sampling) -> bool:
    made = sampling.constraint
    if made is None:
        return True
    if made.begin_after:
        place = output.index(made.begin_after[0])
        assert place <= (made.budget or 0)
        output = output[place + 1 :]
    ended = len(output) == LENGTH + 1 and output[-1] == EOS
    return ended and all(token % 3 == i % 3 for i, token in enumerate(output[:LENGTH]))


def test_every_way_of_scheduling_gives_the_output_of_each_choice_alone(it: Bench) -> None:
    asked = constrained(requests(9, max_tokens=40))
    expected, ties = it.alone(asked), Ties()
    for request in asked:
        for choice in range(request.n):
            assert is_inside(expected[request.name, choice], request.sampling), (request.name, choice)
    for name in ("chunked", "run-ahead depth 3", "preempted", "swapped", "prefix hit", "data parallel 2"):
        loop = CONDITIONS[name](it, asked)
        it.compare(name, asked, expected, loop, ties)
        ends = {key for key, (finish, _) in loop.finishes.items() if finish is FinishReason.STOP}
        assert {key for key, output in expected.items() if len(output) < 40} <= ends, name
    assert not ties.ties


@pytest.mark.parametrize("num_processes", [1, 3])
def test_killing_the_matcher_processes_changes_no_text(
    it: Bench, num_processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = constrained(requests(6, max_tokens=30))
    expected = it.alone(asked)
    matchers = it.roomy.batch.matchers
    assert matchers is not None
    monkeypatch.setattr(matchers, "_num_processes", num_processes)
    before, killed = matchers.num_restarts, 0

    def wait_for_ends() -> None:
        """Until all that were killed are seen to have ended: masks may be there already, and nobody waits for one."""
        deadline = time.monotonic() + 10
        while matchers.count(Stats()).matcher_restarts_total - before < killed:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    loop = CoreLoop(it.roomy, depth=1, prefix_caching=False)
    for request in asked:
        loop.add(request.name, request.prompt, request.sampling, request.n)
    loop.turn()
    for step in range(10**6):
        if not loop.plans:
            break
        if step in (8, 20):
            wait_for_ends()
            for pid in matchers.process_ids.values():
                os.kill(pid, signal.SIGKILL)
                killed += 1
        loop.step()
    assert loop.outputs == expected
    wait_for_ends()
    assert matchers.num_restarts - before == killed > num_processes
    assert matchers.num_waits > 0


def test_a_choice_that_cannot_go_on_fails_alone(it: Bench) -> None:
    driver = Driver(it.roomy)
    prompt = [5, 6, 7]
    failing = driver.add(prompt, Sampling(12, 0.0, constraint=constraint(choices=[[5, 6, 7]], fails_at=2)))
    none_common = driver.add(prompt, Sampling(12, 0.0, constraint=constraint(choices=[[5]]), allowed_token_ids=[6]))
    not_compiled = driver.add(prompt, Sampling(12, 0.0, constraint=constraint(error="not a grammar")))
    good = driver.add(prompt, Sampling(12, 0.0, constraint=constraint(choices=[[5, 6, 7]])))
    driver.run()
    assert (failing.output, failing.finish) == ([5, 6], FinishReason.FAILED)
    assert failing.detail == "the fake grammar fails here, at output token 3"
    assert none_common.detail == "the grammar allows no token of allowed_token_ids, at output token 1"
    assert not_compiled.detail == "not a grammar"
    assert [failing.status, none_common.status, not_compiled.status] == [400] * 3  # clients repeat what has a 500
    assert (good.output, good.finish) == ([5, 6, 7, EOS], FinishReason.STOP)


def test_the_mask_wins_over_a_bias_and_log_probabilities_are_those_of_the_raw_logits(it: Bench) -> None:
    driver = Driver(it.roomy)
    biased = Sampling(12, 0.0, num_logprobs=2, logit_bias=[(9, 100.0)], constraint=constraint(choices=[[5, 6]]))
    masked = driver.add([5, 6, 7], biased)
    driver.run()
    assert masked.output == [5, 6, EOS]
    plain = Driver(it.roomy)
    free = plain.add([5, 6, 7], Sampling(1, 0.0, num_logprobs=VOCAB))
    plain.run()
    values = dict(zip(free.logprobs[0].top_ids, free.logprobs[0].top_logprobs, strict=True))
    assert masked.logprobs[0].logprob == pytest.approx(values[5], abs=1e-4)
    assert masked.logprobs[0].top_ids == free.logprobs[0].top_ids[:2]


def test_min_tokens_and_ignore_eos_end_where_the_grammar_is_complete(it: Bench) -> None:
    driver = Driver(it.roomy)
    made = [
        driver.add([5], Sampling(12, 0.0, constraint=constraint(choices=[[5, 6]]), **limits))  # type: ignore[arg-type]
        for limits in ({"min_tokens": 8}, {"ignore_eos": True}, {"min_tokens": 8, "ignore_eos": True})
    ]
    driver.run()
    assert [(one.output, one.finish) for one in made] == [([5, 6, EOS], FinishReason.STOP)] * 3


@pytest.mark.parametrize("masks", [True, False])
def test_rows_of_steps_that_run_ahead(masks: bool, fake_engine: None, tmp_path_factory: pytest.TempPathFactory) -> None:
    """As on a GPU, with masks on the device and without: late masks and a kill delay constrained choices, which stay
    inside their grammar.
    """
    folder = tmp_path_factory.mktemp("ahead")
    BY_NAME["llama"].save(folder)
    runner = start(folder)
    run_ahead(runner, capacity=12, masks=masks)
    matchers = runner.batch.matchers
    assert matchers is not None
    driver = Driver(runner, depth=3)
    made = [constraint(modulus=3, length=LENGTH), constraint(modulus=3, length=LENGTH, mask_s=0.005), None]
    streams = [
        driver.add([5, 6, 7 + i], Sampling(40, 1.0, seed=i, ignore_eos=True, constraint=made[i % 3]), 0, preempt)
        for i, preempt in enumerate([(), (4,), (), (9,), (), ()])
    ]
    killed = False
    while any(stream.finish is None for stream in streams):
        driver.queued.append(driver.plan())
        while len(driver.queued) + runner.in_flight > driver.depth:
            driver.step()
        if not killed and len(streams[0].output) >= 7 and streams[0].slot is not None:
            killed = True
            for pid in matchers.process_ids.values():
                os.kill(pid, signal.SIGKILL)
            streams[0].preempt_at.add(12)
    assert matchers.num_restarts >= 1
    for stream in streams:
        assert is_inside(stream.output, stream.sampling), stream.detail
        assert stream.finish is (FinishReason.STOP if stream.sampling.constraint else FinishReason.LENGTH)
    close(runner)


def test_a_slow_compilation_delays_its_own_choice_alone(it: Bench) -> None:
    """Steps of the other choices go on, and none of theirs is lost."""
    driver = Driver(it.roomy)
    slow = driver.add([5], Sampling(4, 0.0, constraint=constraint(choices=[[5, 6]], compile_s=1.0)))
    quick = driver.add([5, 6], Sampling(30, 0.0, ignore_eos=True))
    driver.run()
    assert (slow.output, len(quick.output)) == ([5, 6, EOS], 30)
    stats = it.roomy.count(Stats())
    assert stats.mask_waits_total > 0
