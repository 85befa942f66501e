"""HTTP answers and their events, split at any byte."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockyard.services.bench.load import http_response
from blockyard.services.bench.load.http_response import BadResponse

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENTS = [b'{"a":"x"}', b'{"text":"\xc3\xa4 \\n\\n 0\\r\\n"}', b"two\nlines", b"[DONE]"]
BODY = (
    b": ping\r\n\r\n"
    b'data: {"a":"x"}\n\n'
    b'event: y\r\nid: 4\r\ndata:{"text":"\xc3\xa4 \\n\\n 0\\r\\n"}\r\n\r\n'
    b"data: two\ndata: lines\n\n"
    b"data: [DONE]\n\n"
)


def chunked(body: bytes, cuts: list[int]) -> bytes:
    edges = [0, *sorted({c % len(body) for c in cuts} - {0}), len(body)]
    parts = [body[a:b] for a, b in itertools.pairwise(edges)]
    return b"".join(b"%x;ext=1\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


@given(st.lists(st.integers(1, 10_000), max_size=8), st.lists(st.integers(1, 10_000), max_size=20))
def test_events_and_times_do_not_depend_on_where_the_bytes_were_cut(chunks: list[int], reads: list[int]) -> None:
    whole = HEAD + chunked(BODY, chunks)
    edges = [0, *sorted({r % len(whole) for r in reads} - {0}), len(whole)]
    pieces = [(float(i), whole[a:b]) for i, (a, b) in enumerate(itertools.pairwise(edges))]
    found = http_response.read(pieces)
    assert (found.status, found.body, found.complete) == (200, BODY, True)
    events = list(found.events())
    assert [data for _, data in events] == EVENTS
    for i, (at, _) in enumerate(events):  # its last byte was read in this piece
        assert num_events(pieces[: int(at) + 1]) > i >= num_events(pieces[: int(at)])


def num_events(pieces: http_response.TimedReads) -> int:
    has_head = b"\r\n\r\n" in b"".join(piece for _, piece in pieces)
    return len(list(http_response.read(pieces).events())) if has_head else 0


def test_an_event_counts_when_its_last_byte_is_there() -> None:
    first, second = b'data: {"a":1}\n', b"\ndata: 2\n\n"
    pieces = [(1.0, HEAD + b"%x\r\n" % (len(first) + len(second)) + first), (2.0, second[:5]), (3.0, second[5:])]
    assert list(http_response.read(pieces).events()) == [(2.0, b'{"a":1}'), (3.0, b"2")]


def test_a_length_and_the_end_of_the_connection_end_an_answer_too() -> None:
    plain = http_response.read([(1.0, b"HTTP/1.1 429 Too Many\r\nContent-LENGTH: 4\r\n\r\nab"), (2.0, b"cd")])
    assert (plain.status, plain.body, plain.complete) == (429, b"abcd", True)
    assert not http_response.read([(1.0, b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nab")]).complete
    assert http_response.read([(1.0, b"HTTP/1.0 200 OK\r\n\r\nab")]).complete
    assert not http_response.read([(1.0, HEAD + b"5\r\nab")]).complete


@pytest.mark.parametrize(
    ("data", "text"),
    [(b"", "ended before"), (b"HTTP/1.1 200 OK\r\n", "ended before"), (b"SSH-2.0-x\r\n\r\n", "not HTTP/1")],
)
def test_invalid_responses_are_refused(data: bytes, text: str) -> None:
    with pytest.raises(BadResponse, match=text):
        http_response.read([(0.0, data)] if data else [])


def test_a_chunk_without_a_size() -> None:
    with pytest.raises(BadResponse, match="chunk size b'zz"):
        http_response.read([(0.0, HEAD + b"zz\r\n")])
