"""`blockyard.LLM` with a mock worker: real processes, no model."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blockyard import (
    LLM,
    EngineArgs,
    GenerationError,
    LoRARequest,
    RequestOutput,
    SamplingParams,
    TextPrompt,
    TokensPrompt,
)
from blockyard.services.offline.metrics import Histogram
from blockyard.services.offline.outputs import RingLost
from blockyard.shared.errors import BlockyardError, ConfigError, RequestError

SRC = Path(__file__).parents[3] / ".src"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(worker_cls="mock", mock_step_ms=2, max_queue_len=8, max_num_seqs=32, log_level="warning") as llm:
        yield llm


def pids(llm: LLM) -> dict[str, int]:
    return {c.spec.service: c.pid for c in llm._session._ring.supervisor.children if c.pid is not None}


def alive(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def texts(outputs: list[RequestOutput]) -> list[str]:
    return [choice.text for output in outputs for choice in output.outputs]


def test_many_more_prompts_than_the_queue_holds(llm: LLM) -> None:
    prompts = [f"prompt {i}" for i in range(200)]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=5, temperature=0), use_tqdm=False)
    assert [o.prompt for o in outputs] == prompts
    assert len({o.request_id for o in outputs}) == 200 and all(o.finished for o in outputs)
    assert {len(o.outputs[0].token_ids) for o in outputs} == {5}
    tokenizer = llm.get_tokenizer()
    for output in outputs[::20]:
        assert output.prompt is not None
        assert output.prompt_token_ids == tokenizer.encode(output.prompt)
        assert output.outputs[0].text == tokenizer.decode(output.outputs[0].token_ids)


def test_params_for_each_prompt_and_forms_of_prompts(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=i + 1, n=i + 1, seed=i) for i in range(3)]
    outputs = llm.generate(["text", [5, 6, 7], {"prompt_token_ids": [8, 9]}], params, use_tqdm=False)
    assert [len(o.outputs) for o in outputs] == [1, 2, 3]
    assert [[len(c.token_ids) for c in o.outputs] for o in outputs] == [[1], [2, 2], [3, 3, 3]]
    assert [(o.prompt, o.prompt_token_ids) for o in outputs[1:]] == [(None, [5, 6, 7]), (None, [8, 9])]
    assert all(c.finish_reason == "length" for o in outputs for c in o.outputs)
    assert llm.generate([], use_tqdm=False) == []


def test_priorities_are_those_of_their_prompts(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    submit, jobs = llm._session.submit, []
    monkeypatch.setattr(llm._session, "submit", lambda asked: (jobs.extend(asked), submit(asked))[1])
    llm.generate(["a", "b"], SamplingParams(max_tokens=1), use_tqdm=False, priority=[3, -1])
    llm.generate("c", SamplingParams(max_tokens=1), use_tqdm=False)
    assert [job.priority for job in jobs] == [3, -1, 0]
    jobs.clear()
    llm.generate(["a", "b"], SamplingParams(max_tokens=1), use_tqdm=False, priority=4)
    llm.chat([{"role": "user", "content": "a"}], SamplingParams(max_tokens=1), use_tqdm=False, priority=np.int64(5))
    llm.generate(["a", "b"], SamplingParams(max_tokens=1), use_tqdm=False, priority=np.array([6, 7]))
    assert [job.priority for job in jobs] == [4, 4, 5, 6, 7]
    for wrong in (2**31, 1.5, ["high", "low"]):
        with pytest.raises(RequestError, match="priority"):
            llm.generate(["a", "b"], use_tqdm=False, priority=wrong)
    with pytest.raises(ValueError, match="1 priorities for 2 prompts"):
        llm.generate(["a", "b"], use_tqdm=False, priority=[3])


def test_chat_shows_the_prompt_it_made(llm: LLM) -> None:
    conversations = [[{"role": "user", "content": word}] for word in ("hello", "goodbye")]
    outputs = llm.chat(conversations, SamplingParams(max_tokens=2), use_tqdm=False)
    assert ["hello" in (o.prompt or "") for o in outputs] == [True, False]
    (other,) = llm.chat(conversations[0], use_tqdm=False, chat_template="<{{ messages[0].content }}>")
    assert other.prompt == "<hello>"


def test_a_bar_counts_prompts_and_tokens(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a"] * 12, SamplingParams(max_tokens=40))
    shown = capfd.readouterr()
    assert shown.out == "" and "12/12" in shown.err and "tok/s out" in shown.err
    llm.generate(["a"], use_tqdm=False)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("prompts", "params", "text"),
    [
        (["a", "b"], [SamplingParams()], "1 sampling_params for 2 prompts"),
        ("a", SamplingParams(logprobs=21), "logprobs must be at least 0 and at most 20"),
        (["a", [99_999]], SamplingParams(), r"prompts\[1\]: token id 99999 is outside"),
        (["a", [5] * 4096], SamplingParams(), r"context length is 4096 tokens.* length of the prompts\[1\]"),
        ("a", SamplingParams(stop_token_ids=[99_999]), "stop_token_ids"),
        (["a", "b" * 10**6], SamplingParams(), r"prompts\[1\]: .* 1000000 characters in the prompt"),
    ],
)
def test_invalid_requests_raise_before_any_prompt_runs(
    llm: LLM, prompts: object, params: SamplingParams | list[SamplingParams], text: str
) -> None:
    before = llm._session._client.meters.requests
    with pytest.raises(RequestError, match=text):
        llm.generate(prompts, params, use_tqdm=False)
    assert llm._session._client.meters.requests == before


def test_unsupported_arguments_are_refused_by_name(llm: LLM) -> None:
    with pytest.raises(RequestError, match="lora_request must be a LoRARequest"):
        llm.generate("a", lora_request=object())  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="must be a LoRARequest or a list of them, got 'one'"):
        llm.generate("a", lora_request="one")  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="1 lora_requests for 2 prompts"):
        llm.generate(["a", "b"], lora_request=[None])
    with pytest.raises(RequestError, match="serves no adapters: --enable-lora"):
        llm.generate("a", lora_request=LoRARequest("one", 1, "/somewhere"))
    with pytest.raises(RequestError, match="a tool has the type function or custom"):
        llm.chat([{"role": "user", "content": "a"}], tools=[{}])
    with pytest.raises(RequestError, match="must be one of auto, string, openai, got 'parts'"):
        llm.chat([{"role": "user", "content": "a"}], chat_template_content_format="parts")  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="3 priorities for 1 prompts"):
        llm.generate("a", priority=[1, 2, 3])


def test_prompt_token_ids_besides_or_in_place_of_prompts(llm: LLM) -> None:
    params = SamplingParams(max_tokens=1)

    def shown(**keywords: Any) -> list[tuple[str | None, list[int]]]:
        outputs = llm.generate(sampling_params=params, use_tqdm=False, **keywords)
        return [(output.prompt, output.prompt_token_ids) for output in outputs]

    assert shown(prompt_token_ids=[5, 6]) == [(None, [5, 6])]
    assert shown(prompt_token_ids=[[5], [6, 7]]) == [(None, [5]), (None, [6, 7])]
    assert shown(prompts=["a", "b"], prompt_token_ids=[[5], [6]]) == [("a", [5]), ("b", [6])]
    assert shown(prompts="a", prompt_token_ids=[5]) == [("a", [5])]
    assert shown(prompts=[TokensPrompt(prompt_token_ids=[8])]) == [(None, [8])]
    assert shown(prompts=TextPrompt(prompt="text"))[0][0] == "text"
    for wrong in ({"prompts": ["a"], "prompt_token_ids": [[5], [6]]}, {"prompt_token_ids": "ids"}, {}):
        with pytest.raises(RequestError, match="prompt"):
            shown(**wrong)


def test_a_bar_of_the_callers_own(llm: LLM) -> None:
    class Recorder:
        def __init__(self, **made_with: Any) -> None:
            self.made_with, self.postfix, self.updates, self.closed = made_with, "", [], 0
            bars.append(self)

        def update(self, number: int) -> None:
            self.updates.append(number)

        def close(self) -> None:
            self.closed += 1

    bars: list[Any] = []
    llm.generate(["a"] * 12, SamplingParams(max_tokens=40), use_tqdm=Recorder)
    llm.chat([{"role": "user", "content": "a"}], SamplingParams(max_tokens=2), use_tqdm=Recorder)
    assert [(bar.made_with["total"], sum(bar.updates), bar.closed) for bar in bars] == [(12, 12, 1), (1, 1, 1)]
    assert bars[0].made_with["desc"] == "Processed prompts" and "toks/s, output: " in bars[0].postfix
    with pytest.raises(RequestError, match="use_tqdm must be a bool or a factory of progress bars, got 'yes'"):
        llm.generate("a", use_tqdm="yes")  # type: ignore[arg-type]


def test_each_output_says_when_things_happened(llm: LLM) -> None:
    before, monotonic = time.time(), time.monotonic()
    (output,) = llm.generate("a", SamplingParams(max_tokens=20, n=2), use_tqdm=False)
    found = output.metrics
    assert found is not None and found.num_generation_tokens == 40
    assert before <= found.arrival_time <= found.first_token_time < found.finished_time <= time.time()
    assert monotonic <= found.queued_ts <= found.first_token_ts < found.last_token_ts <= time.monotonic()
    took = found.last_token_ts - found.first_token_ts
    # The worker steps every 2 ms. The first token's frame may be read late by as much as the machine is busy.
    assert 10 * 0.002 <= took < 5 and 0 < found.first_token_latency < 5


def values_of(llm: LLM) -> dict[tuple[str, ...], float]:
    found: dict[tuple[str, ...], float] = {}
    for metric in llm.get_metrics():
        labels = tuple(value for key, value in metric.labels.items() if key not in ("model_name", "engine"))
        value = metric.count if isinstance(metric, Histogram) else metric.value  # type: ignore[attr-defined]
        assert (metric.name, *labels) not in found
        found[metric.name, *labels] = value
    return found


def test_counters_and_histograms_under_vllms_names(llm: LLM) -> None:
    before = values_of(llm)
    llm.generate(["word " * 40] * 2, SamplingParams(max_tokens=7), use_tqdm=False)
    grown = {name: value - before[name] for name, value in values_of(llm).items()}
    assert grown["vllm:generation_tokens",] == 14 and grown["vllm:request_success", "length"] == 2
    assert grown["vllm:time_to_first_token_seconds",] == grown["vllm:e2e_request_latency_seconds",] == 2
    assert grown["vllm:request_generation_tokens",] == grown["vllm:request_prompt_tokens",] == 2
    assert grown["vllm:prefix_cache_queries",] == grown["vllm:prompt_tokens",] > 80
    for name in ("queue_time", "prefill_time", "decode_time", "inference_time"):
        assert grown[f"vllm:request_{name}_seconds",] == 2
    assert grown["vllm:request_params_n",] == grown["vllm:request_params_max_tokens",] == 2
    assert grown["vllm:iteration_tokens_total",] >= 7
    gauges = {"vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"}
    assert gauges <= {name for name, *_ in before}
    assert all({"model_name", "engine"} <= metric.labels.keys() for metric in llm.get_metrics())


def test_the_tokenizer_renders_with_the_rings_templates(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    assert llm.get_tokenizer() is tokenizer
    messages = [{"role": "user", "content": "hello"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    (answer,) = llm.chat(messages, SamplingParams(max_tokens=1), use_tqdm=False)
    assert (text, tokenizer.apply_chat_template(messages, add_generation_prompt=True)) == (
        answer.prompt,
        answer.prompt_token_ids,
    )
    assert tokenizer.encode(text, add_special_tokens=False) == answer.prompt_token_ids
    many = tokenizer.apply_chat_template([messages, messages], return_dict=True)
    assert many.input_ids[0] == many["input_ids"][1] and len(many.attention_mask[0]) == len(many.input_ids[0])
    tools = [{"type": "function", "function": {"name": "find"}}]
    template = "{{ tools[0].function.name }} {{ mood }} {{ messages[0].content }}"
    made = tokenizer.apply_chat_template(messages, tools, chat_template=template, mood="glad", tokenize=False)
    assert made == "find glad hello"
    with pytest.raises(RequestError, match="return_tensors"):
        tokenizer.apply_chat_template(messages, return_tensors="pt")


def test_contents_reach_the_template_in_the_form_asked_for(llm: LLM) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    template = "{{ messages[0].content is string }} {{ messages[0].content | length }}"
    shown = []
    for form in ("auto", "string", "openai"):
        (output,) = llm.chat(
            parts,
            use_tqdm=False,
            chat_template=template,
            chat_template_content_format=form,  # type: ignore[arg-type]
        )
        shown.append(output.prompt)
    assert shown == ["True 3", "True 3", "False 2"]


def test_the_prefix_cache_is_reset(llm: LLM) -> None:
    def cached() -> int:
        return llm.generate("word " * 60, SamplingParams(max_tokens=1), use_tqdm=False)[0].num_cached_tokens

    cached()
    assert cached() > 0
    assert llm.reset_prefix_cache() is True
    assert cached() == 0


def test_sleep_needs_its_flag(llm: LLM) -> None:
    with pytest.raises(RequestError, match="enable-sleep-mode"):
        llm.sleep()
    for wrong in ({"level": 3}, {"mode": "soon"}):
        with pytest.raises(RequestError):
            llm.sleep(**wrong)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="tags are weights, kv_cache, scheduling, got 'all'"):
        llm.wake_up(tags=["all"])
    assert len(llm.generate("a", use_tqdm=False)) == 1


class Calls:
    """Calls of `generate` in a thread."""

    def __init__(self, llm: LLM, num_tokens: int) -> None:
        self.outcome: list[object] = []
        self._llm, self._params = llm, SamplingParams(max_tokens=num_tokens, ignore_eos=True, seed=1)
        self._thread = threading.Thread(target=self._call)
        self._thread.start()

    def _call(self) -> None:
        try:
            self.outcome.append(texts(self._llm.generate(["a", "b"], self._params, use_tqdm=False)))
        except BlockyardError as e:
            self.outcome.append(e)

    def result(self, patience_s: float = 20.0) -> object:
        self._thread.join(patience_s)
        return self.outcome[0] if self.outcome else None


def test_sleep_and_wake() -> None:
    arguments = EngineArgs(worker_cls="mock", mock_step_ms=3, enable_sleep_mode=True, log_level="error")
    with LLM.from_engine_args(arguments) as llm:
        meters = llm._session._client.meters
        expected = Calls(llm, 100).result()

        def running() -> Calls:
            start, call = meters.output_tokens, Calls(llm, 100)
            while meters.output_tokens < start + 10:
                time.sleep(0.005)
            return call

        call = running()
        llm.sleep(level=1, mode="keep")
        assert call.result(0.3) is None
        llm.wake_up(tags=["weights"])
        assert call.result(0.3) is None, "it waits for its KV"
        llm.wake_up(tags=["kv_cache"])
        assert call.result() == expected

        call = running()
        llm.sleep(level=2)
        assert "the LLM was put to sleep" in str(call.result()) and isinstance(call.result(), GenerationError)
        call = Calls(llm, 100)
        assert call.result(0.3) is None
        llm.wake_up()
        assert call.result() == expected

        call = running()
        llm.sleep(level=1, mode="wait")
        assert call.result(0) == expected, "it ended before the others slept"
        llm.wake_up()
        llm.sleep(level=0)
        assert Calls(llm, 100).result(0.3) is None
        llm.wake_up(tags=["scheduling"])
        assert Calls(llm, 100).result() == expected


def test_calls_from_threads_and_from_a_running_loop(llm: LLM) -> None:
    params = SamplingParams(max_tokens=30, seed=4)
    expected = texts(llm.generate("a", params, use_tqdm=False))
    found: list[list[str]] = []

    async def inside() -> list[str]:
        return texts(llm.generate("a", params, use_tqdm=False))

    calls = [lambda: texts(llm.generate("a", params, use_tqdm=False)), lambda: asyncio.run(inside())] * 3
    threads = [threading.Thread(target=lambda call=call: found.append(call())) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 6


@pytest.mark.parametrize("service", ["detokenizer", "scheduler"])
def test_a_killed_service_does_not_change_results(llm: LLM, service: str) -> None:
    prompts = [f"def stream_{i}():" for i in range(20)]
    params = SamplingParams(max_tokens=300, seed=3, n=2)
    undisturbed = texts(llm.generate(prompts, params, use_tqdm=False))
    meters, before = llm._session._client.meters, pids(llm)[service]

    def kill() -> None:
        start = meters.output_tokens
        while meters.output_tokens < start + 2000:
            time.sleep(0.01)
        os.kill(before, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    disturbed = texts(llm.generate(prompts, params, use_tqdm=False))
    killer.join()
    assert not alive(before) and meters.resent > 0
    assert disturbed == undisturbed


def test_an_interrupted_call_frees_its_blocks(llm: LLM) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs start with SIGINT ignored
    threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a"] * 60, SamplingParams(max_tokens=3000), use_tqdm=False)
    signal.signal(signal.SIGINT, before)
    deadline = time.monotonic() + 10
    members = llm._session._client.dispatch._links.members
    while any(m.stats.blocks_used or m.stats.running for m in list(members.values()) if m.role == "scheduler"):
        assert time.monotonic() < deadline, "blocks are still in use"
        time.sleep(0.05)
    assert len(llm.generate("a", use_tqdm=False)) == 1


def test_requests_without_a_seed_derive_it_from_the_llms() -> None:
    def draw(seed: int) -> list[list[str]]:
        with LLM("demo", worker_cls="mock", seed=seed, log_level="error") as llm:
            return [texts(llm.generate(["a", "a"], use_tqdm=False)) for _ in range(2)]

    first, other = draw(7), draw(8)
    assert first == draw(7)
    assert len({text for call in first + other for text in call}) == 8, "each request has a seed of its own"


def test_closing_ends_all_processes_and_running_calls(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    llm = LLM(worker_cls="mock", mock_step_ms=20, run_dir=folder, log_level="error")
    children = pids(llm)
    assert children.keys() == {"message_bus", "tokenizer_pool", "scheduler", "gpu_worker", "detokenizer"}
    threading.Timer(0.3, llm.close).start()
    with pytest.raises(RingLost, match="the LLM is closed"):
        llm.generate(["a"] * 5, SamplingParams(max_tokens=1000), use_tqdm=False)
    llm.close()
    assert not any(alive(pid) for pid in children.values())
    assert not llm._session._thread.is_alive()
    with pytest.raises(RingLost, match="the LLM is closed"):
        llm.generate("a", use_tqdm=False)


def test_an_unreferenced_llm_is_closed() -> None:
    llm = LLM(worker_cls="mock", log_level="error")
    children = pids(llm).values()
    del llm
    gc.collect()
    assert not any(alive(pid) for pid in children)


def ring_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "blockyard ring"}


def test_an_error_at_the_start_is_raised(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        LLM("./not/there")
    with pytest.raises(ConfigError, match="max_model_len 5000 is more than the 4096 tokens"):
        LLM("demo", max_model_len=5000)
    before = ring_threads()
    with pytest.raises(BlockyardError, match=r"tokenizer(_pool)? 0: .*has neither tokenizer\.json nor"):
        LLM(worker_cls="mock", tokenizer=tmp_path, log_level="error")
    assert ring_threads() <= before


def script(body: str, *args: str) -> subprocess.CompletedProcess[str]:
    head = "import os, sys\nfrom blockyard import LLM, SamplingParams\n"  # the first line of a user's script
    return subprocess.run(
        [sys.executable, "-X", "dev", "-c", head + textwrap.dedent(body), *args],
        env=os.environ | {"PYTHONPATH": str(SRC), "TMPDIR": tempfile.gettempdir()},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_callers_process_loads_no_torch_and_leaves_nothing_behind() -> None:
    run = script(
        """
        llm = LLM(worker_cls="mock", log_level="error")
        print(*(c.pid for c in llm._session._ring.supervisor.children))
        print(llm.generate(["a"], SamplingParams(max_tokens=3), use_tqdm=False)[0].outputs[0].finish_reason)
        print([name for name in ("torch", "transformers", "triton", "numpy", "aiohttp") if name in sys.modules])
        sys.exit(7)
        """
    )
    assert run.returncode == 7, run.stderr
    children, reason, heavy = run.stdout.splitlines()
    assert (reason, heavy) == ("length", "[]")
    assert len(children.split()) == 5 and not any(alive(int(pid)) for pid in children.split())
    assert "Traceback" not in run.stderr and "Warning" not in run.stderr


def test_the_ring_ends_with_a_script_that_fails() -> None:
    run = script(
        """
        llm = LLM(worker_cls="mock", log_level="error")
        print(*(c.pid for c in llm._session._ring.supervisor.children))
        raise ValueError("oops")
        """
    )
    assert run.returncode == 1 and "oops" in run.stderr
    assert len(run.stdout.split()) == 5 and not any(alive(int(pid)) for pid in run.stdout.split())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_ring_ends_with_a_script_that_is_killed(number: signal.Signals) -> None:
    run = script(
        """
        llm = LLM(worker_cls="mock", log_level="error")
        print(*(c.pid for c in llm._session._ring.supervisor.children), flush=True)
        os.kill(os.getpid(), int(sys.argv[1]))
        """,
        str(int(number)),
    )
    assert run.returncode == -number, run.stderr
    children = [int(pid) for pid in run.stdout.split()]
    deadline = time.monotonic() + 5
    while any(alive(pid) for pid in children) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(children) == 5 and not any(alive(pid) for pid in children)


def test_a_fork_does_not_close_its_parents_ring() -> None:
    run = script(
        """
        llm = LLM(worker_cls="mock", log_level="error")
        if os.fork() == 0:
            llm.close()
            os._exit(0)
        os.wait()
        print(len(llm.generate("a", use_tqdm=False)))
        """
    )
    assert (run.returncode, run.stdout.strip()) == (0, "1"), run.stderr
