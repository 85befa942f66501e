"""Batches on the gateway's own pipeline, with a fake ring."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic.types
import msgspec
import openai.types
import pytest
from fake_ring import FakeRing

from blockyard.services.api_gateway.batches import batch_run
from blockyard.services.api_gateway.batches.batch_files import OutputFile
from blockyard.services.api_gateway.batches.batch_run import BatchRun, LineLimits
from blockyard.services.api_gateway.batches.batch_service import run_until
from blockyard.services.api_gateway.batches.line_records import LineRecords
from blockyard.services.api_gateway.request_pipeline import RequestPipeline
from blockyard.shared.config.services.batch import BatchConfig
from blockyard.shared.errors import BatchError, BlockyardError
from blockyard.shared.messages import Generate, QueueCapacity, Refused, Tokenize

CHAT, COMPLETION, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
USER: list[Any] = [{"role": "user", "content": "hi"}]


def line(name: str, url: str = COMPLETION, **body: Any) -> dict[str, Any]:
    prompt: dict[str, Any] = {"prompt": "x"} if url == COMPLETION else {"messages": USER}
    return {"custom_id": name, "method": "POST", "url": url, "body": {"model": "tiny", "max_tokens": 3} | prompt | body}


def refused(frame: Generate, retry_after_s: float) -> Refused:
    return Refused(frame.request_id, frame.attempt, 429, "", "busy", QueueCapacity(9, 9999, retry_after_s))


class Batch:
    """The files of a batch, run as often as a test wants."""

    def __init__(self, rig: Any, folder: Path) -> None:
        self._rig = rig
        self.input, self.output = folder / "in.jsonl", folder / "out.jsonl"

    def write(self, *lines: dict[str, Any] | bytes) -> None:
        data = [each if isinstance(each, bytes) else msgspec.json.encode(each) for each in lines]
        self.input.write_bytes(b"\n".join(data) + b"\n")

    def lines(self) -> list[Any]:
        return [msgspec.json.decode(each) for each in self.output.read_bytes().splitlines()]

    def by_id(self) -> dict[str | None, Any]:
        found = {each["custom_id"]: each for each in self.lines()}
        assert len(found) == len(self.lines())
        return found

    @asynccontextmanager
    async def opened(
        self, max_lines: int = 8, patience_s: float = batch_run.PATIENCE_S, behind: bool = False, **fields: Any
    ) -> AsyncIterator[tuple[BatchRun, FakeRing]]:
        async with self._rig(**fields) as r:
            output, records, gateway = OutputFile(self.output), LineRecords(), r.gateway
            config = BatchConfig(input=str(self.input), output=str(self.output), max_lines=max_lines)
            limits = LineLimits(r.gateway_config.max_body_bytes, behind_online=behind, patience_s=patience_s)
            yield BatchRun(config, limits, gateway.pipeline, gateway.body_parser, output, output, records), r.ring
            output.close()
            records.close()
            assert gateway.pipeline.num_active == 0

    async def run(self, **fields: Any) -> tuple[BatchRun, FakeRing]:
        async with self.opened(**fields) as (run, ring):
            await run.run()
            return run, ring


@pytest.fixture
def batch(rig: Any, tmp_path: Path) -> Batch:
    return Batch(rig, tmp_path)


async def test_answers_are_those_of_the_server(batch: Batch) -> None:
    batch.write(line("chat", CHAT), line("text"), line("message", MESSAGES), line("count", f"{MESSAGES}/count_tokens"))
    run, _ = await batch.run()
    found = batch.by_id()
    assert (run.num_answered, run.num_failed, run.num_skipped) == (4, 0, 0)
    for each in found.values():
        assert each.keys() == {"id", "custom_id", "response", "error"} and each["error"] is None
        assert each["id"].startswith("batch_req_")
        assert each["response"].keys() == {"status_code", "request_id", "body"}
        assert each["response"]["status_code"] == 200
    bodies = {name: each["response"]["body"] for name, each in found.items()}
    chat = openai.types.chat.ChatCompletion.model_validate(bodies["chat"], strict=False)
    assert chat.choices[0].message.content == "w0 w1 w2 "
    assert chat.id == f"chatcmpl-{found['chat']['response']['request_id']}"
    assert openai.types.Completion.model_validate(bodies["text"]).choices[0].text == "w0 w1 w2 "
    message = anthropic.types.Message.model_validate(bodies["message"])
    assert message.content[0].type == "text" and message.stop_reason == "max_tokens"
    counted = bodies["count"]["input_tokens"]
    assert counted == message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)


async def test_a_bad_line_fails_alone(batch: Batch) -> None:
    batch.write(
        line("good"),
        b"{",
        line("good", CHAT),
        line("url", "/v1/moderations"),
        line("stream", stream=True),
        line("stream-message", MESSAGES, stream=True),
        line("field", temperature="hot"),
        line("model", model="other"),
        line("list") | {"body": [1]},
        line("null") | {"body": None},
        b"x" * 300_000,
        line("last"),
    )
    run, _ = await batch.run(max_body_bytes=200_000)
    errors = {each["error"]["line"]: each["error"]["code"] for each in batch.lines() if each["error"]}
    assert errors == {2: "invalid_json_line", 3: "duplicate_custom_id", 4: "invalid_url", 11: "line_too_long"}
    answers = {each["custom_id"]: each["response"] for each in batch.lines() if each["response"]}
    statuses = {name: answer["status_code"] for name, answer in answers.items()}
    wrong = dict.fromkeys(("stream", "stream-message", "field", "list", "null"), 400)
    assert statuses == wrong | {"model": 404, "good": 200, "last": 200}
    assert answers["field"]["body"]["error"]["param"] == "temperature"
    assert answers["stream"]["body"]["error"]["param"] == "stream"
    assert answers["stream-message"]["body"]["error"]["type"] == "invalid_request_error"  # of that API
    assert (run.num_answered, run.num_failed) == (12, 10)


async def test_a_body_larger_than_the_server_takes(batch: Batch) -> None:
    batch.write(line("large", prompt="x" * 5000), line("small"))
    await batch.run(max_body_bytes=4096)
    statuses = {name: each["response"]["status_code"] for name, each in batch.by_id().items()}
    assert statuses == {"large": 413, "small": 200}


async def test_what_the_output_has_is_left_out(batch: Batch) -> None:
    names = [f"line {i}" for i in range(30)]
    lines: list[Any] = [line(name) for name in names]
    lines[3], lines[7], lines[9] = b"nonsense", lines[8], line("line 9", "/nowhere")
    batch.write(*lines)
    await batch.run()
    whole = batch.lines()
    assert len(whole) == 30
    for kept in (0, 5, 29, 30):
        batch.output.write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for each in whole[:kept]) + b'{"id": "cut')
        run, ring = await batch.run()
        keys = {(each["custom_id"], (each["error"] or {}).get("line")) for each in batch.lines()}
        assert len(batch.lines()) == len(keys) == 30 and batch.lines()[:kept] == whole[:kept]
        assert (run.num_answered, run.num_skipped) == (30 - kept, kept)
        assert len(ring.frames(Generate)) == sum(each["response"] is not None for each in whole[kept:])


async def test_an_id_of_an_earlier_failure_is_left_out_too(batch: Batch) -> None:
    """Such as a line of another server, whose errors have no number."""
    batch.output.write_bytes(
        b'{"id":"1","custom_id":"a","response":null,"error":{"code":"batch_expired","message":""}}\n'
    )
    batch.write(line("a"), line("b"))
    _, ring = await batch.run()
    assert batch.by_id().keys() == {"a", "b"} and len(ring.frames(Generate)) == 1


async def test_an_output_that_is_another_file(batch: Batch) -> None:
    batch.write(line("a"))
    batch.output.write_text("my notes\n")
    with pytest.raises(BatchError, match="line 1 is no line of a batch's output"):
        await batch.run()
    assert batch.output.read_text() == "my notes\n"


async def test_few_lines_are_answered_at_a_time(batch: Batch) -> None:
    batch.write(*(line(f"line {i}") for i in range(40)))
    most = 0
    async with batch.opened(max_lines=5) as (run, ring):

        def none(frame: Generate) -> None:
            nonlocal most
            most = max(most, len(ring.running) + 1)

        ring.refuse = none
        await run.run()
    assert most == 5 and len(batch.by_id()) == 40


async def test_large_lines_are_bounded_in_bytes(batch: Batch) -> None:
    batch.write(*(line(f"line {i}", padding="x" * 40_000) for i in range(12)))
    most = 0
    async with batch.opened(max_lines=12, max_body_bytes=50_000) as (run, ring):

        def none(frame: Generate) -> None:
            nonlocal most
            most = max(most, len(ring.running) + 1)

        ring.refuse = none
        await run.run()
    assert most == 4 and len(batch.by_id()) == 12  # of four times 50,000 bytes


async def test_a_busy_ring_is_asked_again(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    batch.write(line("a"), line("b"))
    refusals = 0
    async with batch.opened() as (run, ring):

        def busy(frame: Generate) -> Refused | None:
            nonlocal refusals
            refusals += 1
            return None if refusals > 4 else refused(frame, 0.01)

        ring.refuse = busy
        await run.run()
    assert [each["response"]["status_code"] for each in batch.lines()] == [200, 200] and refusals > 4
    batch.output.unlink()
    async with batch.opened(patience_s=0.05) as (run, ring):
        ring.refuse = lambda frame: refused(frame, 0.02)
        await run.run()
    assert [each["response"]["status_code"] for each in batch.lines()] == [429, 429]


async def test_lines_wait_for_the_ring(batch: Batch) -> None:
    batch.write(line("a"))
    async with batch.opened(join=False) as (run, ring):
        running = asyncio.create_task(run.run())
        await asyncio.sleep(0.1)
        assert ring.frames(Tokenize) == [] and not running.done()
        ring.join_all()
        await running
    assert batch.by_id()["a"]["response"]["status_code"] == 200


async def test_a_full_disk_ends_the_batch(batch: Batch) -> None:
    batch.write(*(line(f"line {i}") for i in range(30)))
    batch.output = Path("/dev/full")
    with pytest.raises(BatchError, match="No space left on device"):
        await batch.run()


async def test_an_input_that_is_gone(batch: Batch) -> None:
    with pytest.raises(BatchError, match=r"in\.jsonl: No such file"):
        await batch.run()


async def test_a_bug_fails_its_line_alone(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    batch.write(line("a"), line("b"))
    answer = RequestPipeline.whole_answer

    async def broken(pipeline: RequestPipeline, api: Any, request: Any, tenant: str, enter: Any) -> bytes:
        if len(batch.output.read_bytes()) == 0:
            raise KeyError("bug")
        return await answer(pipeline, api, request, tenant, enter)

    monkeypatch.setattr(RequestPipeline, "whole_answer", broken)
    await batch.run(max_lines=1)
    assert [each["response"]["status_code"] for each in batch.lines()] == [500, 200]


async def test_a_stop_leaves_out_what_does_not_end_in_time(batch: Batch) -> None:
    batch.write(*(line(f"line {i}", max_tokens=2 if i < 4 else 200) for i in range(8)))
    async with batch.opened(max_lines=4) as (run, ring):
        ring.step_s, stopped = 0.02, asyncio.Event()
        running = asyncio.create_task(run_until(run, stopped, 0.2))
        async with asyncio.timeout(5):
            while len(ring.frames(Generate)) < 8:
                await asyncio.sleep(0.01)
        stopped.set()
        with pytest.raises(BlockyardError, match="stopped before its last line"):
            await running
    assert batch.by_id().keys() == {f"line {i}" for i in range(4)}
    run, _ = await batch.run()
    assert (run.num_answered, run.num_skipped, len(batch.by_id())) == (4, 4, 8)


@pytest.mark.parametrize("behind", [True, False])
async def test_lines_behind_online_requests_begin_one_in_an_iteration_of_the_loop(
    batch: Batch, behind: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines that started together end together, and as many follow them at once."""
    batch.write(*[line(str(i)) for i in range(40)])
    loop, begun, iteration, read = asyncio.get_running_loop(), Counter[int](), 0, batch_run.read_line

    def count() -> None:
        nonlocal iteration
        iteration += 1
        loop.call_soon(count)

    def read_counted(data: bytes, number: int) -> Any:
        begun[iteration] += 1
        return read(data, number)

    monkeypatch.setattr(batch_run, "read_line", read_counted)
    loop.call_soon(count)
    async with batch.opened(behind=behind) as (run, ring):
        ring.step_s = 0.01
        await run.run()
    assert begun.total() == 40 and (max(begun.values()) == 1) == behind
