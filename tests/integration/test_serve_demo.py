"""The demo model through every service: the `openai` client, curl-like streams, aborts."""

import asyncio
import signal
import subprocess
import time
from collections.abc import Iterator

import aiohttp
import openai
import pytest
from rig import Server, completion, serve, streams, texts

CODE = "def read_file(path):\n    with open("


@pytest.fixture(scope="module")
def ring() -> Iterator[Server]:
    with serve("demo", "--dtype", "float32") as server:
        yield server


@pytest.fixture(scope="module")
def client(ring: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{ring.url}/v1", api_key="none") as client:
        yield client


@pytest.fixture(scope="module")
def model(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


def test_completion_knows_some_python(client: openai.OpenAI, model: str) -> None:
    answer = client.completions.create(model=model, prompt=CODE, max_tokens=8, temperature=0)
    assert "path" in answer.choices[0].text
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 8


def test_a_stream_adds_up_to_the_whole_answer(client: openai.OpenAI, model: str) -> None:
    whole = client.completions.create(model=model, prompt=CODE, max_tokens=48, temperature=0)
    parts = client.completions.create(
        model=model,
        prompt=CODE,
        max_tokens=48,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(parts)
    assert "".join(c.choices[0].text for c in chunks if c.choices) == whole.choices[0].text
    assert chunks[-1].usage == whole.usage
    assert len(chunks) > 10


def test_chat_streams_and_ends(client: openai.OpenAI, model: str) -> None:
    messages = [{"role": "user", "content": "Write a function that returns the larger of two numbers."}]
    chunks = list(client.chat.completions.create(model=model, messages=messages, max_tokens=200, stream=True, seed=1))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text.strip()
    assert chunks[-1].choices[0].finish_reason in ("stop", "length")


def test_the_same_seed_gives_the_same_text_and_choices_differ(client: openai.OpenAI, model: str) -> None:
    def draw() -> list[str]:
        answer = client.completions.create(model=model, prompt=CODE, max_tokens=24, temperature=1.0, n=3, seed=7)
        return [choice.text for choice in sorted(answer.choices, key=lambda c: c.index)]

    first = draw()
    assert first == draw()
    assert len(set(first)) == 3


def test_a_prompt_that_fills_the_context_is_scored(client: openai.OpenAI, model: str) -> None:
    answer = client.completions.create(model=model, prompt=[5] * 4096, max_tokens=0, echo=True, logprobs=1, n=2)
    for choice in answer.choices:
        assert choice.logprobs is not None and choice.finish_reason == "length"
        assert choice.logprobs.token_logprobs is not None and len(choice.logprobs.token_logprobs) == 4096
    assert answer.usage is not None and answer.usage.completion_tokens == 0
    answer = client.completions.create(
        model=model, prompt=[5] * 4090, max_tokens=10**6, extra_body={"ignore_eos": True}
    )
    assert answer.usage is not None and answer.usage.total_tokens == 4096


def test_lm_eval_scores_a_prompt(client: openai.OpenAI, model: str) -> None:
    answer = client.completions.create(model=model, prompt=CODE, max_tokens=0, echo=True, logprobs=1)
    choice = answer.choices[0]
    assert choice.text == CODE
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs is not None
    assert choice.logprobs.token_logprobs[0] is None
    assert all(logprob < 0 for logprob in choice.logprobs.token_logprobs[1:])


def test_stop_strings_end_the_text(client: openai.OpenAI, model: str) -> None:
    free = client.completions.create(model=model, prompt=CODE, max_tokens=48, temperature=0).choices[0].text
    stop = free[len(free) // 2 : len(free) // 2 + 3]
    cut = client.completions.create(model=model, prompt=CODE, max_tokens=48, temperature=0, stop=stop).choices[0]
    assert cut.text == free[: free.index(stop)]
    assert cut.finish_reason == "stop"


def test_a_prompt_longer_than_the_context_is_refused_by_name(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.BadRequestError, match="4096"):
        client.completions.create(model=model, prompt=[5] * 5000, max_tokens=1)


@pytest.mark.parametrize("waits_for_whole_answer", [True, False])
def test_a_client_that_leaves_frees_its_blocks(ring: Server, waits_for_whole_answer: bool) -> None:
    async def leave() -> None:
        async with aiohttp.ClientSession() as session:
            body = completion(3000) | {"stream": not waits_for_whole_answer}
            request = asyncio.create_task(session.post(f"{ring.url}/v1/completions", json=body))
            while not (await totals(session, ring))["blocks_used"]:
                await asyncio.sleep(0.05)
            if waits_for_whole_answer:
                request.cancel()
            else:
                (await request).close()
            for _ in range(100):
                now = await totals(session, ring)
                if not now["blocks_used"] and not now["running"]:
                    return
                await asyncio.sleep(0.1)
            pytest.fail(f"still in use: {now}")

    asyncio.run(asyncio.wait_for(leave(), 30))


async def totals(session: aiohttp.ClientSession, server: Server) -> dict[str, int]:
    async with session.get(f"{server.url}/ring") as answer:
        return (await answer.json())["totals"]


def test_many_streams_at_once_equal_each_alone(ring: Server) -> None:
    """Greedy in fp32: equal up to ties, and these prompts have none (checked when the model was trained)."""
    bodies = [completion(32, prompt=f"class Stream{i}:\n    def ") for i in range(6)]
    together = [log.text for log in asyncio.run(streams(ring.url, bodies))]
    alone = [asyncio.run(streams(ring.url, [body]))[0].text for body in bodies]
    assert together == alone


def test_sigterm_lets_running_requests_finish() -> None:
    with serve("demo", "--worker-cls", "mock", "--mock-step-ms", "10") as server:
        bodies = [completion(100, seed=1)]
        expected = asyncio.run(texts(server.url, bodies))
        found = asyncio.run(texts(server.url, bodies, lambda: server.process.send_signal(signal.SIGTERM)))
        assert found == expected
        assert server.process.wait(30) == 0


def test_a_port_in_use_is_one_line(ring: Server) -> None:
    with pytest.raises(RuntimeError, match="ended with"), serve("demo", "--port", str(ring.port)):
        pytest.fail("started on a port in use")


def test_no_process_is_left(ring: Server) -> None:
    """Children die with a launcher that was killed."""
    with serve("demo", "--worker-cls", "mock") as server:
        children = list(server.children().values())
        assert len(children) >= 6
        server.process.kill()
        server.process.wait()
        listed = ["ps", "-o", "stat=", "-p", ",".join(map(str, children))]
        deadline = time.monotonic() + 20
        while not all(
            state.startswith("Z")
            for state in subprocess.run(listed, capture_output=True, text=True, check=False).stdout.split()
        ):
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_best_of_returns_the_likeliest_a_token(client: openai.OpenAI, model: str) -> None:
    """`n` and `best_of` generate the same choices; `best_of` returns only the best."""
    asked = {"model": model, "prompt": CODE, "max_tokens": 12, "temperature": 1.0, "seed": 5, "logprobs": 0}
    every = client.completions.create(n=6, **asked)
    best = client.completions.create(n=2, best_of=6, **asked)

    def mean(choice: openai.types.CompletionChoice) -> float:
        assert choice.logprobs is not None and choice.logprobs.token_logprobs is not None
        return sum(choice.logprobs.token_logprobs) / len(choice.logprobs.token_logprobs)

    ranked = sorted(every.choices, key=mean, reverse=True)
    assert [c.text for c in best.choices] == [c.text for c in ranked[:2]]
    assert [c.index for c in best.choices] == [0, 1]
    assert best.usage is not None and every.usage is not None
    assert best.usage.completion_tokens == every.usage.completion_tokens, "what was computed is what it cost"
    with pytest.raises(openai.BadRequestError, match="best_of"):
        client.completions.create(n=2, best_of=6, stream=True, **asked)


def test_beam_search_finds_what_is_likelier_than_greedy(client: openai.OpenAI, model: str) -> None:
    asked = {"model": model, "prompt": CODE, "max_tokens": 16, "temperature": 0, "logprobs": 0}
    greedy = client.completions.create(**asked).choices[0]
    beams = client.completions.create(n=4, extra_body={"use_beam_search": True, "length_penalty": 0.0}, **asked)
    totals = [sum(c.logprobs.token_logprobs or []) for c in beams.choices if c.logprobs is not None]
    assert totals == sorted(totals, reverse=True)
    assert len({c.text for c in beams.choices}) == 4
    assert greedy.logprobs is not None
    assert totals[0] >= sum(greedy.logprobs.token_logprobs or []) - 1e-3
    for wrong, field in (({"stream": True}, "use_beam_search"), ({"temperature": 0.7}, "temperature")):
        with pytest.raises(openai.BadRequestError, match=field):
            client.completions.create(n=4, extra_body={"use_beam_search": True}, **(asked | wrong))
