"""`client.files` and `client.batches` of the openai package against a live ring whose gateways are killed."""

import contextlib
import json
import os
import signal
import time
from pathlib import Path

import openai
from rig import Server, serve

LINES = 1500
LIMIT_S = 60.0
MOCK = ("--model", "demo", "--worker-cls", "mock", "--mock-step-ms", "5", "--max-num-seqs", "32")


def gateways(ring: Server) -> dict[str, int]:
    return {title: pid for title, pid in ring.children().items() if "api_gateway" in title}


def owner(folder: Path, ring: Server, batch_id: str) -> int | None:
    """The gateway that has the lock of the batch."""
    inode = (folder / "locks" / batch_id).stat().st_ino
    for entry in Path("/proc/locks").read_text().splitlines():
        fields = entry.split()
        if "FLOCK" in fields and fields[5].endswith(f":{inode}") and int(fields[4]) in gateways(ring).values():
            return int(fields[4])
    return None


def test_a_batch_goes_on_after_its_gateway_and_after_its_server_are_killed(tmp_path: Path) -> None:
    folder = tmp_path / "batches"
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
    line = {"method": "POST", "url": "/v1/chat/completions", "body": body}
    data = "".join(json.dumps({"custom_id": f"line {i}"} | line) + "\n" for i in range(LINES)).encode()
    flags = (*MOCK, "--api-gateways", "2", "--batch-dir", str(folder))

    def until(client: openai.OpenAI, num: int) -> openai.types.Batch:
        end = time.monotonic() + LIMIT_S
        while time.monotonic() < end:
            try:
                batch = client.batches.retrieve(batch_id)
            except openai.APIConnectionError:
                continue
            if batch.request_counts is not None and batch.request_counts.completed >= num:
                return batch
            time.sleep(0.05)
        raise AssertionError(f"{num} lines were not answered")

    with serve(*flags) as ring:
        client = openai.OpenAI(base_url=f"{ring.url}/v1", api_key="none")
        file = client.files.create(file=("in.jsonl", data), purpose="batch")
        batch_id = client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        ).id
        until(client, 50)
        pid = owner(folder, ring, batch_id)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        until(client, 300)
        answer = client.chat.completions.create(model="", messages=body["messages"], max_tokens=4)  # type: ignore[arg-type]
        assert answer.usage is not None and answer.usage.completion_tokens == 4
        for pid in ring.family():
            with contextlib.suppress(ProcessLookupError):  # the others end with the launcher
                os.kill(pid, signal.SIGKILL)
    with serve(*flags) as ring:
        client = openai.OpenAI(base_url=f"{ring.url}/v1", api_key="none")
        batch = until(client, LINES)
        while batch.status != "completed":
            batch = client.batches.retrieve(batch_id)
        assert batch.request_counts is not None and batch.request_counts.failed == 0
        assert batch.output_file_id is not None
        lines = [json.loads(each) for each in client.files.content(batch.output_file_id).text.splitlines()]
        assert len(lines) == LINES and {each["custom_id"] for each in lines} == {f"line {i}" for i in range(LINES)}
        assert {each["response"]["status_code"] for each in lines} == {200}
