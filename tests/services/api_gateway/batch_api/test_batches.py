"""`client.files` and `client.batches` of the openai package, with a fake ring behind the gateway."""

import asyncio
import json
import sqlite3
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from blockyard.services.api_gateway.batch_api import jobs
from blockyard.shared.errors import BatchError
from blockyard.shared.messages import Generate

CHAT = "/v1/chat/completions"
USER: list[Any] = [{"role": "user", "content": "hi"}]
ENDED = ("completed", "failed", "cancelled", "expired")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "LOOK_S", 0.02)
    monkeypatch.setattr(jobs, "CANCEL_S", 0.2)


@asynccontextmanager
async def client(r: Any, key: str = "none") -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{r.url}/v1", api_key=key, max_retries=0) as c:
        yield c


def line(name: str, url: str = CHAT, **body: Any) -> dict[str, Any]:
    given = {"model": "tiny", "max_tokens": 3} | ({"messages": USER} if url == CHAT else {"prompt": "x"}) | body
    return {"custom_id": name, "method": "POST", "url": url, "body": given}


def jsonl(*lines: Any) -> bytes:
    return b"\n".join(each if isinstance(each, bytes) else json.dumps(each).encode() for each in lines)


async def started(c: openai.AsyncOpenAI, data: bytes) -> Any:
    file = await c.files.create(file=("in.jsonl", data), purpose="batch")
    return await c.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")


async def ended(c: openai.AsyncOpenAI, batch_id: str) -> Any:
    async with asyncio.timeout(10):
        while (batch := await c.batches.retrieve(batch_id)).status not in ENDED:
            await asyncio.sleep(0.02)
    return batch


async def lines_of(c: openai.AsyncOpenAI, file_id: str) -> dict[str | None, Any]:
    content = await c.files.content(file_id)
    return {each["custom_id"]: each for each in map(json.loads, content.text.splitlines())}


async def test_a_batch_has_an_output_and_an_error_file(rig, tmp_path: Path) -> None:
    async with rig(batch_dir=str(tmp_path)) as r, client(r) as c:
        good = [line(f"good {i}") for i in range(20)]
        bad = [b'{"custom_id": "torn', line("good 3"), line("streams", stream=True), line("other", "/v1/completions")]
        bad += [line("wrong", temperature=-3), line("no model", model="other")]
        batch = await started(c, jsonl(*good, *bad))
        assert batch.status == "validating" and batch.request_counts.total == 0
        batch = await ended(c, batch.id)
        assert batch.status == "completed" and batch.completed_at >= batch.in_progress_at
        counts = batch.request_counts
        assert (counts.total, counts.completed, counts.failed) == (26, 20, 6)
        output, errors = await lines_of(c, batch.output_file_id), await lines_of(c, batch.error_file_id)
        assert set(output) == {f"good {i}" for i in range(20)}
        answer = output["good 0"]["response"]["body"]
        assert openai.types.chat.ChatCompletion.model_validate(answer).choices[0].message.content
        codes = {name: each["error"] and each["error"]["code"] for name, each in errors.items()}
        assert codes[None] == "invalid_json_line" and codes["good 3"] == "duplicate_custom_id"
        assert codes["other"] == "mismatched_endpoint"
        assert errors["streams"]["response"]["body"]["error"]["param"] == "stream"
        assert errors["wrong"]["response"]["status_code"] == 400
        assert errors["no model"]["response"]["status_code"] == 404
        assert all(frame.batch_line for frame in r.ring.frames(Generate))


async def test_an_empty_file_fails_its_batch_alone(rig, tmp_path: Path) -> None:
    async with rig(batch_dir=str(tmp_path)) as r, client(r) as c:
        empty, good = await started(c, b"\n \n"), await started(c, jsonl(line("a")))
        batch = await ended(c, empty.id)
        assert batch.status == "failed" and batch.errors.data[0].code == "empty_file"
        assert (await ended(c, good.id)).status == "completed"


async def test_files_and_batches_are_listed_with_cursors_and_belong_to_a_key(rig, tmp_path: Path) -> None:
    async with (
        rig(batch_dir=str(tmp_path), api_keys=["one", "two"]) as r,
        client(r, "one") as mine,
        client(r, "two") as other,
    ):
        made = [await started(mine, jsonl(line("a"))) for _ in range(5)]
        for each in made:
            await ended(mine, each.id)
        newest = [each.id for each in reversed(made)]
        page = await mine.batches.list(limit=2)
        assert [each.id for each in page.data] == newest[:2] and page.has_more
        assert [each.id async for each in mine.batches.list(limit=2)] == newest
        assert not (await mine.batches.list(after=newest[-1])).data
        inputs = [each.id async for each in mine.files.list(purpose="batch", limit=2, order="asc")]
        assert inputs == [each.input_file_id for each in made]
        assert (await other.batches.list()).data == [] and (await other.files.list()).data == []
        for call in (
            other.batches.retrieve(newest[0]),
            other.batches.cancel(newest[0]),
            other.files.retrieve(inputs[0]),
            other.files.content(inputs[0]),
            other.files.delete(inputs[0]),
            other.batches.create(input_file_id=inputs[0], endpoint=CHAT, completion_window="24h"),
            mine.files.retrieve("../batches.sqlite"),
        ):
            with pytest.raises(openai.NotFoundError):
                await call
        with pytest.raises(openai.BadRequestError, match="after"):
            await mine.batches.list(after="batch_nothing")
        assert (await mine.files.delete(inputs[0])).deleted
        with pytest.raises(openai.NotFoundError):
            await mine.files.content(inputs[0])


async def test_a_cancelled_batch_keeps_what_is_answered(rig, tmp_path: Path) -> None:
    async with rig(batch_dir=str(tmp_path), batch_lines=2) as r, client(r) as c:
        r.ring.step_s = 0.3
        batch = await started(c, jsonl(*(line(f"{i}") for i in range(50))))
        await r.until(lambda: len(r.ring.frames(Generate)) >= 2)
        with pytest.raises(openai.ConflictError):
            await c.files.delete(batch.input_file_id)
        assert (await c.batches.cancel(batch.id)).status == "cancelling"
        batch = await ended(c, batch.id)
        assert batch.status == "cancelled" and batch.request_counts.completed < 50
        assert (await c.batches.cancel(batch.id)).status == "cancelled"


async def test_another_gateway_goes_on_where_one_stopped(rig, tmp_path: Path) -> None:
    names = [f"{i}" for i in range(40)]
    async with rig(batch_dir=str(tmp_path), batch_lines=1) as r, client(r) as c:
        r.ring.step_s = 0.005  # the counts are written now and then: it is not to end before they are seen
        batch = await started(c, jsonl(*map(line, names)))
        while (await c.batches.retrieve(batch.id)).request_counts.completed < 5:
            await asyncio.sleep(0.01)
        first = len(r.ring.frames(Generate))
    assert first < 40
    async with rig(batch_dir=str(tmp_path)) as r, client(r) as c:
        batch = await ended(c, batch.id)
        assert (batch.status, batch.request_counts.completed) == ("completed", 40)
        assert len((await c.files.content(batch.output_file_id)).text.splitlines()) == 40
        assert set(await lines_of(c, batch.output_file_id)) == set(names)
        assert len(r.ring.frames(Generate)) < 40, "what the output had is not computed again"


async def test_a_full_disk_fails_the_batch_alone(rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append = jobs.OutputFile.append

    def full(file: Any, data: bytes) -> None:
        if b'"custom_id":"full"' in data:
            raise BatchError("No space left on device", file.path)
        append(file, data)

    monkeypatch.setattr(jobs.OutputFile, "append", full)
    async with rig(batch_dir=str(tmp_path)) as r, client(r) as c:
        failing, good = await started(c, jsonl(line("full"))), await started(c, jsonl(line("a")))
        batch = await ended(c, failing.id)
        said = "the server cannot read or write the files of the batch: No space left on device"
        assert (batch.status, batch.errors.data[0].message) == ("failed", said)
        assert (await ended(c, good.id)).status == "completed"


async def test_a_broken_database_is_named_in_the_log_alone(
    rig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with rig(batch_dir=str(tmp_path)) as r, client(r) as c:
        with sqlite3.connect(tmp_path / "batches.sqlite") as db:
            db.execute("DROP TABLE files")
        db.close()
        with pytest.raises(openai.APIStatusError, match="cannot write its records: no such table: files") as e:
            await c.files.list()
        assert e.value.status_code == 507 and str(tmp_path) not in str(e.value)
    assert f"{tmp_path}/batches.sqlite: no such table: files" in caplog.text


async def test_wrong_uploads_and_batches_name_their_field(rig, tmp_path: Path) -> None:
    async with rig(batch_dir=str(tmp_path), max_file_bytes=100) as r, client(r) as c:
        with pytest.raises(openai.APIStatusError) as e:
            await c.files.create(file=("in.jsonl", b"x" * 101), purpose="batch")
        assert e.value.status_code == 413 and "--max-file-bytes" in str(e.value)
        with pytest.raises(openai.APIStatusError) as e:
            await c.files.create(file=("in.jsonl", b"x" * 9000), purpose="batch")
        assert e.value.status_code == 413
        with pytest.raises(openai.BadRequestError, match="purpose"):
            await c.files.create(file=("in.jsonl", b"x"), purpose="fine-tune")
        file = await c.files.create(file=("in.jsonl", b"x"), purpose="batch")
        for field, asked in {
            "endpoint": {"input_file_id": file.id, "endpoint": "/v1/none", "completion_window": "24h"},
            "completion_window": {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "1h"},
            "input_file_id": {"endpoint": CHAT, "completion_window": "24h"},
            "metadata": {
                **{"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"},
                "metadata": {str(i): "" for i in range(17)},
            },
        }.items():
            status, body = await r.post("/v1/batches", asked)
            assert (status, body["error"]["param"]) == (400, field)
        async with r.http.post("/v1/files", data={"purpose": "batch"}) as response:
            assert response.status == 415, "a form without a file is urlencoded"
        headers = {"Content-Type": "multipart/form-data; boundary=x"}
        control = b'--x\r\nContent-Disposition: form-data; name="\x7f"\r\n\r\nhi\r\n--x--\r\n'
        for data in (
            control,
            b"",
            b"--x\r\n",
            b"--x--\r\n",
            b"--x\r\nContent-Disposition: form-data\r\n\r\nhi\r\n--x--\r\n",
        ):
            async with r.http.post("/v1/files", data=data, headers=headers) as response:
                assert response.status == 400
        async with r.http.post("/v1/files", data=b"", headers={"Content-Type": "multipart/form-data"}) as response:
            assert response.status == 400
        assert not list((tmp_path / "uploads").iterdir())


async def test_what_was_kept_for_its_time_is_removed(rig, tmp_path: Path) -> None:
    async with rig(batch_dir=str(tmp_path), batch_retention_s=60.0) as r, client(r) as c:
        batch = await ended(c, (await started(c, jsonl(line("a")))).id)
        store = jobs.BatchStore(tmp_path, 60.0)
        store.sweep(batch.created_at + 59)
        assert (await c.batches.retrieve(batch.id)).id == batch.id
        store.sweep(batch.created_at + 100)
        store.close()
        with pytest.raises(openai.NotFoundError):
            await c.batches.retrieve(batch.id)
        assert (await c.files.list()).data == [] and not list((tmp_path / "files").iterdir())


async def test_files_expire_when_they_are_to(rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with rig(batch_dir=str(tmp_path)) as r, client(r) as c:
        soon: Any = {"anchor": "created_at", "seconds": 3600}
        file = await c.files.create(file=("in.jsonl", jsonl(line("a"))), purpose="batch", expires_after=soon)
        assert file.expires_at == file.created_at + 3600
        batch = await c.batches.create(
            input_file_id=file.id, endpoint=CHAT, completion_window="24h", output_expires_after=soon
        )
        output = await c.files.retrieve((await ended(c, batch.id)).output_file_id)
        assert output.expires_at == output.created_at + 3600
        kept = await c.files.create(file=("other.jsonl", b"x"), purpose="batch")
        store = jobs.BatchStore(tmp_path, 30 * 24 * 3600)
        store.sweep(time.time() + 4000)
        store.close()
        assert [one.id for one in (await c.files.list()).data] == [kept.id]
        for wrong in ({"anchor": "nope", "seconds": 3600}, {"anchor": "created_at", "seconds": 5}):
            with pytest.raises(openai.BadRequestError) as caught:
                await c.files.create(file=("in.jsonl", b"x"), purpose="batch", expires_after=wrong)  # type: ignore[arg-type]
            assert caught.value.param == "expires_after"
            with pytest.raises(openai.BadRequestError) as caught:
                await c.batches.create(
                    input_file_id=kept.id, endpoint=CHAT, completion_window="24h",
                    output_expires_after=wrong,  # type: ignore[arg-type]
                )  # fmt: skip
            assert str(caught.value.param).startswith("output_expires_after")


async def test_without_a_folder_the_endpoints_say_so(rig) -> None:
    async with rig() as r, client(r) as c:
        with pytest.raises(openai.NotFoundError, match="--batch-dir"):
            await c.batches.list()
        with pytest.raises(openai.NotFoundError, match="--batch-dir"):
            await c.files.create(file=("in.jsonl", b"x"), purpose="batch")
