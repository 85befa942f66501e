"""Compiled decode steps in a worker: the right tokens, and plain steps wherever they are not to be had."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from plan_driver import Driver
from ties import Ties
from tiny_models import BY_NAME, VOCAB, Tiny, greedy_score, settings, start
from transformers import PreTrainedModel

from blockyard.kernels import compile_cpp
from blockyard.kernels.decode_step import Rows
from blockyard.services.gpu_worker import compiled_steps, engine
from blockyard.services.gpu_worker.compiled_steps import CompiledSteps, Ints
from blockyard.services.gpu_worker.runner import Runner
from blockyard.services.gpu_worker.step_trials import TRIALS, Trials
from blockyard.shared.messages import Sampling

OUTPUT = 24
LENGTHS = (1, 9, 30, 17)
FAMILIES = ("llama", "llama-llama3", "llama-odd", "mistral-window", "qwen2-window", "qwen3")


def wide(name: str) -> Tiny:
    """Of a head size that the kernel takes."""
    tiny = BY_NAME[name]
    return replace(tiny, fields=tiny.fields | {"head_dim": 32, "hidden_size": 128, "num_attention_heads": 4})


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(2, VOCAB, n).tolist() for n in LENGTHS]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("llama")
    return folder, wide("llama").save(folder)


@pytest.fixture(autouse=True)
def eager_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times on a busy machine decide nothing here."""
    monkeypatch.setattr(Trials, "prefers_compiled", lambda trials, rows: True)


def steps_of(runner: Runner) -> CompiledSteps:
    steps = runner.host.device
    assert isinstance(steps, CompiledSteps)
    return steps


def compiled(folder: Path, **fields: object) -> Runner:
    if compile_cpp.find_compiler() is None:
        pytest.skip("no C++ compiler")
    runner = start(folder, compiled_steps=True, **fields)
    assert steps_of(runner)._library.wait() is not None
    return runner


def count_calls(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each compiled step from now on."""
    steps, seen = steps_of(runner), []
    forward = steps._forward

    def counted(slots: Ints, counts: Ints) -> tuple[torch.Tensor, torch.Tensor | None]:
        seen.append(int(counts.sum()))
        return forward(slots, counts)

    monkeypatch.setattr(steps, "_forward", counted)
    return seen


def generate(runner: Runner, depth: int = 0, preempt_at: tuple[int, ...] = (), **asked: object) -> Driver:
    driver = Driver(runner, depth=depth, chunk=12)
    for prompt in prompts():
        driver.add(
            prompt, Sampling(max_tokens=OUTPUT, ignore_eos=True, **({"temperature": 0.0} | asked)), 0, preempt_at
        )
    driver.run()
    return driver


@pytest.mark.parametrize("name", FAMILIES)
def test_the_tokens_of_transformers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = wide(name).save(tmp_path)
    runner = compiled(tmp_path)
    seen = count_calls(runner, monkeypatch)
    driver, ties = generate(runner), Ties()
    for stream in driver.streams:
        ids = torch.tensor([stream.prompt])
        with torch.no_grad():
            out = theirs.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=OUTPUT, eos_token_id=None
            )
        ties.compare(name, stream.prompt, out[0, ids.shape[1] :].tolist(), stream.output, greedy_score(theirs))
    ties.check()
    assert len(seen) > TRIALS
    assert len(LENGTHS) in seen
    assert max(seen) > 3 * len(LENGTHS)  # steps with prompts too


def test_bfloat16_is_near_float32(saved: tuple[Path, PreTrainedModel], monkeypatch: pytest.MonkeyPatch) -> None:
    folder, theirs = saved
    runner = compiled(folder, dtype="bfloat16")
    seen = count_calls(runner, monkeypatch)
    driver, ties = generate(runner), Ties(torch.bfloat16)
    exact = generate(start(folder))
    for ours, other in zip(driver.streams, exact.streams, strict=True):
        ties.compare("bfloat16", ours.prompt, other.output[:1], ours.output[:1], greedy_score(theirs))
        assert len(ours.output) == OUTPUT
    assert len(seen) > TRIALS


def test_preempted_and_queued_streams_go_on(saved: tuple[Path, PreTrainedModel]) -> None:
    folder, theirs = saved
    plain, ours = generate(start(folder)), generate(compiled(folder), depth=2, preempt_at=(5, 11))
    ties = Ties()
    for a, b in zip(plain.streams, ours.streams, strict=True):
        ties.compare("preempted", a.prompt, a.output, b.output, greedy_score(theirs))
    ties.check()


def test_what_is_asked_for_beside_tokens(saved: tuple[Path, PreTrainedModel]) -> None:
    asked = {"temperature": 0.8, "seed": 5, "num_logprobs": 2, "num_prompt_logprobs": 1, "presence_penalty": 0.5}
    folder, _ = saved
    plain, ours = generate(start(folder), **asked), generate(compiled(folder), **asked)
    for a, b in zip(plain.streams, ours.streams, strict=True):
        assert a.output == b.output
        assert sorted(a.prompt_logprobs) == sorted(b.prompt_logprobs)
        for x, y in zip(a.logprobs, b.logprobs, strict=True):
            assert x.logprob == pytest.approx(y.logprob, abs=1e-4)


def test_steps_are_plain_until_the_library_is_there(
    saved: tuple[Path, PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = saved
    runner = compiled(folder)
    seen, library = count_calls(runner, monkeypatch), steps_of(runner)._library
    with monkeypatch.context() as m:
        m.setattr(library, "poll", lambda: None)
        first = generate(runner)
    assert seen == []
    again = generate(runner)
    assert seen
    assert [s.output for s in first.streams] == [s.output for s in again.streams]


def test_a_failing_compiler_is_said_once(
    saved: tuple[Path, PreTrainedModel],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\necho 'error: out of order' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    runner = start(saved[0], compiled_steps=True)
    steps_of(runner)._library.wait()
    assert all(len(s.output) == OUTPUT for s in generate(runner).streams)
    assert [r.message for r in caplog.records if "out of order" in r.message] == [
        f"decode steps stay plain, the compiled ones cannot be compiled: {broken} failed (1): error: out of order"
    ]


def test_steps_that_disagree_are_not_used(
    saved: tuple[Path, PreTrainedModel], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder, _ = saved
    runner = compiled(folder)
    steps = steps_of(runner)
    right = steps._step

    class Wrong:
        def bind(self, *args: object) -> None:
            right.bind(*args)

        def __call__(self, rows: Rows, logits: torch.Tensor | None) -> torch.Tensor:
            return right(rows, logits).flip(-1)

    monkeypatch.setattr(steps, "_step", Wrong())
    plain, ours = generate(start(folder)), generate(runner)
    assert [s.output for s in plain.streams] == [s.output for s in ours.streams]
    assert sum("differ from plain ones" in r.message for r in caplog.records) == 1


def test_the_slower_way_is_left(saved: tuple[Path, PreTrainedModel], monkeypatch: pytest.MonkeyPatch) -> None:
    runner = compiled(saved[0])
    seen = count_calls(runner, monkeypatch)
    monkeypatch.setattr(Trials, "prefers_compiled", lambda trials, rows: not trials.is_over(rows))
    generate(runner)
    assert 0 < len(seen) <= TRIALS * len(set(seen))


def test_a_choice_that_fails_fails_alone(saved: tuple[Path, PreTrainedModel]) -> None:
    runner = compiled(saved[0])
    generate(runner)
    driver = Driver(runner)
    good, bad = (driver.add(p, Sampling(max_tokens=OUTPUT, ignore_eos=True, temperature=0.0)) for p in prompts()[:2])
    while len(bad.output) < TRIALS + 2:
        driver.queued.append(driver.plan())
        driver.step()
    with torch.inference_mode():
        runner.pool.memory[:, bad.blocks] = torch.nan
    driver.run()
    assert "not finite" in bad.detail
    assert len(good.output) == OUTPUT


def test_asleep_and_awake(saved: tuple[Path, PreTrainedModel], monkeypatch: pytest.MonkeyPatch) -> None:
    runner = compiled(saved[0])
    before = generate(runner)
    runner.reset(0)
    runner.park()
    runner.unpark()
    seen = count_calls(runner, monkeypatch)
    assert [s.output for s in generate(runner).streams] == [s.output for s in before.streams]
    assert seen


def test_a_prompt_of_one_token_can_be_scored(saved: tuple[Path, PreTrainedModel]) -> None:
    """Its step decodes, as the kernel sees it, and `hidden` is looked at."""
    runner = compiled(saved[0], dtype="bfloat16")
    asked = Sampling(max_tokens=2, ignore_eos=True, temperature=0.0, num_prompt_logprobs=1)
    for _ in range(TRIALS + 1):
        driver = Driver(runner, chunk=1)
        stream = driver.add([5, 6, 7], asked)
        driver.run()
        assert sorted(stream.prompt_logprobs) == [1, 2]


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"compiled_steps": False}, None),
        ({"batch_invariant": True}, None),
        ({"dtype": "float16"}, "none for float16 weights"),
    ],
)
def test_where_there_are_none(saved: tuple[Path, PreTrainedModel], fields: dict[str, object], why: str | None) -> None:
    notes: list[str] = []
    config = settings(saved[0], **({"compiled_steps": True} | fields))
    runner = engine.start(config, lambda phase, done, lines: notes.__setitem__(slice(None), lines))
    assert runner.host.device is None
    assert [n for n in notes if n.startswith("decode steps")] == ([] if why is None else [n for n in notes if why in n])


def test_another_architecture_has_none(tmp_path: Path) -> None:
    BY_NAME["opt"].save(tmp_path)
    runner = start(tmp_path, compiled_steps=True)
    assert runner.host.device is None
    assert compiled_steps.why_none(runner.model, 1 << 40) == "this architecture has none"


def test_without_a_compiler(saved: tuple[Path, PreTrainedModel], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no such compiler")
    notes: list[str] = []
    config = settings(saved[0], compiled_steps=True)
    runner = engine.start(config, lambda phase, done, lines: notes.__setitem__(slice(None), lines))
    assert runner.host.device is None
    assert sum("no C++ compiler" in note for note in notes) == 1


def test_a_copy_that_is_too_large(saved: tuple[Path, PreTrainedModel], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_steps, "MOST_COPY_BYTES", 1000)
    notes: list[str] = []
    engine.start(
        settings(saved[0], compiled_steps=True), lambda phase, done, lines: notes.__setitem__(slice(None), lines)
    )
    assert sum("copy of the weights would take" in note for note in notes) == 1


def test_long_prompts_stay_plain(saved: tuple[Path, PreTrainedModel], monkeypatch: pytest.MonkeyPatch) -> None:
    runner = compiled(saved[0])
    monkeypatch.setattr(compiled_steps, "MOST_KEYS", 8)
    seen = count_calls(runner, monkeypatch)
    generate(runner)
    assert [rows for rows in seen if rows > len(LENGTHS)] == [34]  # the first chunks, without keys before them
