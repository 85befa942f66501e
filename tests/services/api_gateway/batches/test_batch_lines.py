"""OpenAI's batch format, and the files of a batch, without a ring."""

import io
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockyard.services.api_gateway.batches import batch_lines
from blockyard.services.api_gateway.batches.batch_files import OutputFile, read_lines
from blockyard.services.api_gateway.batches.batch_lines import BatchRequest, WrittenLine, WrongLine
from blockyard.services.api_gateway.batches.line_records import Known, LineRecords
from blockyard.shared.errors import BatchError

LINE: dict[str, Any] = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}


def read(**fields: Any) -> BatchRequest | WrongLine:
    return batch_lines.read_line(msgspec.json.encode(LINE | fields), 7)


def test_a_line_is_a_request_of_its_api() -> None:
    found = read(body={"prompt": "é"}, unknown=1)
    assert isinstance(found, BatchRequest)
    assert (found.custom_id, found.api.name, msgspec.json.decode(found.body)) == ("a", "completions", {"prompt": "é"})
    for url, name in (("/v1/chat/completions", "chat"), ("/v1/messages", "messages")):
        found = read(url=url)
        assert isinstance(found, BatchRequest) and found.api.name == name


@pytest.mark.parametrize(
    ("fields", "code", "words"),
    [
        ({"method": "GET"}, "invalid_method", "GET"),
        ({"url": "/v1/moderations"}, "invalid_url", "/v1/moderations"),
        ({"url": 5}, "invalid_json_line", "url"),
        ({"method": None}, "invalid_json_line", "method"),
    ],
)
def test_a_line_that_is_no_request_keeps_its_name(fields: dict[str, Any], code: str, words: str) -> None:
    found = read(**fields)
    assert isinstance(found, WrongLine)
    assert (found.custom_id, found.error.code, found.error.line) == ("a", code, 7)
    assert "line 7" in found.error.message and words in found.error.message


@pytest.mark.parametrize("line", [b"no JSON", b'{"custom_id": 5}', b"[1]", b"\xff", b"[" * 100_000, b'"\\ud800"'])
def test_a_line_without_a_name(line: bytes) -> None:
    found = batch_lines.read_line(line, 1)
    assert isinstance(found, WrongLine) and found.custom_id is None and found.error.code == "invalid_json_line"


@given(st.lists(st.binary(max_size=20)), st.integers(1, 12), st.booleans())
def test_lines_are_numbered_and_bounded(lines: list[bytes], most: int, ends: bool) -> None:
    lines = [line.replace(b"\n", b" ").replace(b"\xef", b"") for line in lines]
    data = b"\n".join(lines) + (b"\n" if ends else b"")
    expected = [
        (number, line.strip() if len(line) <= most else None)
        for number, line in enumerate(data.split(b"\n"), 1)
        if line.strip() or len(line) > most
    ]
    assert list(read_lines(io.BytesIO(data), most)) == expected


def test_a_byte_order_mark_belongs_to_no_line() -> None:
    assert list(read_lines(io.BytesIO(b"\xef\xbb\xbf{}\r\n\xef\xbb\xbf{}"), 99)) == [(1, b"{}"), (2, b"\xef\xbb\xbf{}")]


def test_a_line_that_was_cut_off_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "out"
    for whole in (b"", b"one\n" * 40_000):
        path.write_bytes(whole + b"half" * 30_000)
        output = OutputFile(path)
        assert [line for _, line in output.read(99)] == [b"one"] * whole.count(b"\n")
        output.append(b"two")
        output.close()
        assert path.read_bytes() == whole + b"two\n"


def test_a_full_disk_leaves_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "out"
    output = OutputFile(path)
    assert list(output.read(99)) == []
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (25, before[1]))  # the third line is written in part
    try:
        output.append(b"x" * 9)
        output.append(b"x" * 9)
        with pytest.raises(BatchError, match=f"{path}: File too large"):
            output.append(b"x" * 9)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.read_bytes() == (b"x" * 9 + b"\n") * 2
    output.close()
    full = OutputFile(Path("/dev/full"))
    assert list(full.read(99)) == []
    with pytest.raises(BatchError, match="/dev/full: No space left on device"):
        full.append(b"x")
    full.close()


def test_an_output_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(BatchError, match="Is a directory"):
        OutputFile(tmp_path)


def test_what_is_known_of_an_id() -> None:
    records = LineRecords()
    records.written(WrittenLine("old"))
    assert [records.read("old") for _ in range(3)] == [Known.ANSWERED, Known.READ, Known.READ]
    assert [records.read("new") for _ in range(2)] == [Known.NEW, Known.READ]
    repeated = batch_lines.repeated("twice", 9)
    records.written(WrittenLine("twice", repeated.error))  # its first line may not be answered yet
    assert records.is_reported(repeated) and not records.is_reported(batch_lines.repeated("twice", 10))
    assert records.read("twice") is Known.NEW
    records.close()


def test_known_ids_are_not_held_in_memory() -> None:
    """A set of as many digests would take 20 MB."""
    program = """
import resource
from blockyard.services.api_gateway.batches.line_records import Known, LineRecords
def peak_mb(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
records = LineRecords()
for i in range(20_000): records.read(f"request-{i}")
before = peak_mb()
for i in range(20_000, 220_000): assert records.read(f"request-{i}") is Known.NEW
assert records.read("request-0") is Known.READ
print(peak_mb() - before)
"""
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 6
