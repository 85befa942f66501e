"""`LLMEngine` with a mock worker: the loops that scripts for vLLM drive."""

import argparse
import itertools
import os
from collections.abc import Iterator

import pytest

from blockyard import LLM, EngineArgs, LLMEngine, RequestOutput, RequestOutputKind, SamplingParams
from blockyard.services.offline.outputs import RingLost
from blockyard.shared.errors import RequestError

MOCK = ["--worker-cls", "mock", "--mock-step-ms", "2", "--log-level", "warning"]


@pytest.fixture(scope="module")
def engine() -> Iterator[LLMEngine]:
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    engine = LLMEngine.from_engine_args(EngineArgs.from_cli_args(parser.parse_args(MOCK)))
    yield engine
    engine.close()


def drive(engine: LLMEngine) -> dict[str, list[RequestOutput]]:
    """Every output of each request, in order."""
    found: dict[str, list[RequestOutput]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            found.setdefault(output.request_id, []).append(output)
    return found


def test_the_loop_of_vllms_example(engine: LLMEngine) -> None:
    prompts = [
        ("A robot may not injure a human being", SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=1)),
        ("To be or not to be,", SamplingParams(temperature=0.8, top_k=5, presence_penalty=0.2)),
        ("What is the meaning of life?", SamplingParams(n=2, best_of=5, temperature=0.8, frequency_penalty=0.1)),
    ]
    expected, finished, request_id = [p for p, _ in prompts], [], 0
    while prompts or engine.has_unfinished_requests():
        if prompts:
            prompt, params = prompts.pop(0)
            engine.add_request(str(request_id), prompt, params)
            request_id += 1
        finished += [output for output in engine.step() if output.finished]
    finished.sort(key=lambda output: output.request_id)
    assert [output.prompt for output in finished] == expected
    assert [len(output.outputs) for output in finished] == [1, 1, 2]
    assert all(len(one.token_ids) == 16 for output in finished for one in output.outputs)
    assert finished[0].prompt_logprobs is not None and finished[0].outputs[0].logprobs is not None
    assert engine.step() == [] and engine.get_num_unfinished_requests() == 0


@pytest.mark.parametrize("n", [1, 3])
def test_kinds_of_outputs(engine: LLMEngine, n: int) -> None:
    for kind in RequestOutputKind:
        params = SamplingParams(n=n, max_tokens=300, seed=1, logprobs=0, output_kind=kind)
        engine.add_request(kind.name, "the same prompt", params)
    found = drive(engine)
    [whole] = found["FINAL_ONLY"]
    assert whole.finished and len(whole.outputs) == n
    *_, last = cumulative = found["CUMULATIVE"]
    assert len(cumulative) > 2 and not cumulative[0].finished and last.finished
    assert [one.text for one in last.outputs] == [one.text for one in whole.outputs]
    for before, after in itertools.pairwise(cumulative):
        assert after.outputs[0].text.startswith(before.outputs[0].text)
    deltas = found["DELTA"]
    assert len(deltas) > 2 and [one.finished for one in deltas] == [False] * (len(deltas) - 1) + [True]
    for index, choice in enumerate(whole.outputs):
        parts = [one for delta in deltas for one in delta.outputs if one.index == index]
        assert "".join(one.text for one in parts) == choice.text
        assert [i for one in parts for i in one.token_ids] == choice.token_ids
        assert sum(len(one.logprobs or []) for one in parts) == len(choice.token_ids)
        assert [one.finish_reason for one in parts] == [None] * (len(parts) - 1) + ["length"]


def test_aborted_requests_return_nothing_more(engine: LLMEngine) -> None:
    for name in ("a", "b", "c"):
        engine.add_request(name, "prompt", SamplingParams(max_tokens=300))
    engine.abort_request(["a", "unknown"])
    engine.step()
    engine.abort_request("b")
    assert engine.get_num_unfinished_requests() == 1
    found = drive(engine)
    assert found.keys() == {"c"} and found["c"][-1].finished
    engine.add_request("a", "prompt", SamplingParams(max_tokens=2))  # its id is free again
    assert drive(engine)["a"][-1].outputs[0].finish_reason == "length"


def test_what_cannot_be_served_is_refused_when_it_is_added(engine: LLMEngine) -> None:
    engine.add_request("open", "prompt", SamplingParams(max_tokens=5))
    for request_id, prompt, params, text in (
        ("open", "prompt", None, "'open' is in use"),
        (7, "prompt", None, "request_id must be a text"),
        ("x", [5] * 5000, None, "context length"),
        ("x", ["two", "prompts"], None, "one prompt, got 2"),
        ("x", [99_999_999], None, "token id"),
        ("x", "prompt", SamplingParams(logprobs=21), "logprobs"),
    ):
        with pytest.raises(RequestError, match=text):
            engine.add_request(request_id, prompt, params)
    with pytest.raises(RequestError, match="lora_request"):
        engine.add_request("x", "prompt", lora_request=object())
    assert drive(engine).keys() == {"open"}


def test_calls_into_the_worker_are_refused_by_name(engine: LLMEngine) -> None:
    for method in (
        engine.collective_rpc,
        engine.apply_model,
    ):
        with pytest.raises(RequestError, match=f"`{method.__name__}` is not built yet; "):
            method("name")


def test_what_scripts_read_of_an_engine(engine: LLMEngine) -> None:
    assert engine.model_config.max_model_len == engine.get_model_config().max_model_len == 4096
    assert engine.model_config.get_vocab_size() >= len(engine.get_tokenizer())
    assert engine.tokenizer.encode("text") == engine.get_tokenizer().encode("text")
    assert engine.reset_prefix_cache()


def test_the_engine_of_an_llm() -> None:
    with LLM(worker_cls="mock", log_level="warning") as llm:
        engine = llm.llm_engine
        assert llm.llm_engine is engine
        engine.add_request("one", "prompt", SamplingParams(max_tokens=3), priority=2)
        (output,) = llm.generate("prompt", SamplingParams(max_tokens=3), use_tqdm=False)  # beside it
        found = drive(engine)["one"][-1]
        assert output.finished and len(found.outputs[0].token_ids) == 3
        engine.add_request("late", "prompt", SamplingParams(max_tokens=3000))
    with pytest.raises(RingLost):
        drive(engine)
    assert not engine.has_unfinished_requests()


def test_a_forked_child_is_told_at_once() -> None:
    with LLM(worker_cls="mock", log_level="warning") as llm:
        reader, writer = os.pipe()
        if (child := os.fork()) == 0:
            with os.fdopen(writer, "w") as out:
                try:
                    llm.generate("prompt", use_tqdm=False)
                except RingLost as e:
                    out.write(str(e))
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as answer:
            text = answer.read()
        os.waitpid(child, 0)
        assert f"made in process {os.getpid()}" in text and f"does not work in {child}" in text
        assert llm.generate("prompt", SamplingParams(max_tokens=2), use_tqdm=False)[0].finished
