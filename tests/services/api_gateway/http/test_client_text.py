"""Text of requests in log lines."""

import asyncio
import logging

import pytest

MALFORMED = [b"GET / HTTP/9\r\n\r\n", b"GET /\x00 HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\r\nno colon\r\n\r\n"]
MALFORMED += [b"GET / HTTP/1.1\r\nA: " + b"x" * 20_000 + b"\r\n\r\n", b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n"]


async def test_a_path_cannot_forge_a_log_line(rig, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with rig() as r:
        await r.post("/v1/x%0A2026-11-22%20ERROR%20forged%1b[31m", {})
    lines = [record.getMessage() for record in caplog.records if "forged" in record.getMessage()]
    assert len(lines) == 1 and lines[0].isprintable() and "/v1/x\\n2026-11-22" in lines[0]


@pytest.mark.parametrize("data", MALFORMED, ids=["version", "path", "header", "length", "content-length"])
async def test_a_malformed_request_is_one_line(rig, caplog: pytest.LogCaptureFixture, data: bytes) -> None:
    async with rig() as r:
        reader, writer = await asyncio.open_connection("127.0.0.1", r.port)
        writer.write(data)
        assert (await reader.readline()).split()[1] == b"400"
        writer.close()
        await writer.wait_closed()
        async with r.http.get("/live") as response:
            assert response.status == 200
    [record] = [record for record in caplog.records if record.name != "asyncio"]
    assert record.exc_info is None and record.levelno == logging.WARNING
    assert record.getMessage().startswith("malformed request: ")
    assert record.getMessage().isprintable() and len(record.getMessage()) < 300
