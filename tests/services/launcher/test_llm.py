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

import pytest
from tokenizers import Tokenizer

from blockyard import LLM, RequestOutput, SamplingParams
from blockyard.services.launcher.offline.errors import RingLost
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
    assert isinstance(tokenizer, Tokenizer)
    for output in outputs[::20]:
        assert output.prompt is not None
        assert output.prompt_token_ids == tokenizer.encode(output.prompt).ids
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
        (["a", "b"], [SamplingParams(), SamplingParams(max_tokens=10**6)], r"1000002 tokens \(2 in the prompts\[1\]"),
        ("a", SamplingParams(stop_token_ids=[99_999]), "stop_token_ids"),
    ],
)
def test_what_cannot_be_served_raises_before_anything_runs(
    llm: LLM, prompts: object, params: SamplingParams | list[SamplingParams], text: str
) -> None:
    before = llm._session._client.meters.requests
    with pytest.raises(RequestError, match=text):
        llm.generate(prompts, params, use_tqdm=False)
    assert llm._session._client.meters.requests == before


def test_what_is_not_built_is_refused_by_name(llm: LLM) -> None:
    for keyword in ({"lora_request": object()}, {"use_tqdm": print}):
        with pytest.raises(RequestError, match="not built"):
            llm.generate("a", **keyword)  # type: ignore[arg-type]
    for keyword in ({"tools": [{}]}, {"chat_template_content_format": "openai"}):
        with pytest.raises(RequestError, match="not built"):
            llm.chat([{"role": "user", "content": "a"}], **keyword)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="3 priorities for 1 prompts"):
        llm.generate("a", priority=[1, 2, 3])


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
def test_results_do_not_show_that_a_service_was_killed(llm: LLM, service: str) -> None:
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


def test_an_interrupted_call_frees_what_it_had(llm: LLM) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs begin with it ignored
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


def test_the_seed_of_the_llm_decides_what_has_none() -> None:
    def draw(seed: int) -> list[list[str]]:
        with LLM("demo", worker_cls="mock", seed=seed, log_level="error") as llm:
            return [texts(llm.generate(["a", "a"], use_tqdm=False)) for _ in range(2)]

    first, other = draw(7), draw(8)
    assert first == draw(7)
    assert len({text for call in first + other for text in call}) == 8, "each request has a seed of its own"


def test_closing_ends_all_processes_and_what_runs(tmp_path: Path) -> None:
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


def test_an_llm_nobody_holds_is_closed() -> None:
    llm = LLM(worker_cls="mock", log_level="error")
    children = pids(llm).values()
    del llm
    gc.collect()
    assert not any(alive(pid) for pid in children)


def ring_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "blockyard ring"}


def test_what_keeps_the_ring_from_starting_is_raised(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        LLM("./not/there")
    before = ring_threads()
    with pytest.raises(BlockyardError, match=r"tokenizer(_pool)? 0: .*has neither tokenizer\.json nor"):
        LLM(worker_cls="mock", tokenizer=tmp_path, log_level="error")
    assert ring_threads() <= before


def script(body: str, *args: str) -> subprocess.CompletedProcess[str]:
    head = "import os, sys\nfrom blockyard import LLM, SamplingParams\n"  # as a user's script begins
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


def test_a_script_that_fails_takes_the_ring_along() -> None:
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
def test_a_script_that_is_killed_takes_the_ring_along(number: signal.Signals) -> None:
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
