"""The figures of a server with two ranks on the CPU, one of which is killed."""

from collections.abc import Iterator

import pytest
from rig import serve as rig_serve

from blockyard.services.bench.load.results import BenchError
from blockyard.services.bench.parallel import measures
from blockyard.services.bench.parallel.layouts import read_layout
from blockyard.services.bench.parallel.measures import ParallelSizes
from blockyard.services.bench.prefill_decode.measures import PDSizes
from blockyard.services.bench.suite.served import SuiteServer

TWO = read_layout("tp2")
SIZES = ParallelSizes(
    runs=1,
    stream=(8, 12),
    many=3,
    many_len=(8, 200),
    prompt=64,
    beside=2,
    beside_len=(8, 400),
    num_prompts=2,
    requests=3,
    requests_len=(8, 8),
    killed_output=60,
    kill_after=10,
    texts=3,
    texts_len=(8, 60),
)


@pytest.fixture(scope="module")
def server() -> Iterator[SuiteServer]:
    with rig_serve("demo", "--device", "cpu", "--max-model-len", "2048", *measures.TEXT_FLAGS, *TWO.flags) as running:
        yield SuiteServer(running.url, running.launched_s)


def test_figures_and_a_killed_rank(server: SuiteServer) -> None:
    assert measures.first_token_s(server, SIZES) > 0
    assert measures.kv_blocks(server, SIZES) > 0 and measures.first_token(server, SIZES) > 0
    assert measures.rate(server, SIZES) > 0 and measures.rate_of_all(server, SIZES) > 0
    killed: list[int] = []

    def kill(pid: int, number: int) -> None:
        killed.append(pid)
        measures.os.kill(pid, number)

    pids = measures.rank_pids(server)
    assert measures.killed_rank_s(server, SIZES, kill) > 0.5, "a worker needs longer to start"
    assert killed == pids[-1:] and len(pids) == 2
    again = measures.rank_pids(server)
    assert set(pids).isdisjoint(again) and len(again) == 2


def test_texts_with_a_killed_rank_are_compared(server: SuiteServer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert measures.equal_texts(server, SIZES) == 1.0
    monkeypatch.setattr(measures.os, "kill", lambda pid, number: None)
    with pytest.raises(BenchError, match="the rank was not killed"):
        measures.equal_texts(server, SIZES)
    texts, pids = iter([["a", "b"], ["a", "c"]]), iter([[1, 2], [3, 4]])
    monkeypatch.setattr(SuiteServer, "texts", lambda *_: next(texts))
    monkeypatch.setattr(measures, "rank_pids", lambda _: next(pids))
    assert measures.equal_texts(server, SIZES) == 0.5


def test_streams_beside_prompts_and_the_second_token_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    served, asked = SuiteServer("http://127.0.0.1:1", 0.0), list[PDSizes]()

    def stream_itl(_: SuiteServer, sizes: PDSizes, num_prompts: int) -> float:
        asked.append(sizes)
        return float(num_prompts)

    monkeypatch.setattr(SuiteServer, "stream", lambda *_, **__: [])
    monkeypatch.setattr(measures, "stream_itl", stream_itl)
    monkeypatch.setattr(measures, "prompts_alone", lambda _, sizes: (float(sizes.prompt), 7.5, 3.0))
    assert measures.beside_prompts(served, SIZES) == SIZES.num_prompts
    [found] = asked
    assert (found.prompt, found.prompts_per_s, found.streams, found.stream_input, found.stream_output) == (
        *(64, 1.0, 2),
        *SIZES.beside_len,
    )
    assert measures.handover(served, SIZES) == 4.5


def test_the_gap_behind_the_kill_counts() -> None:
    times = [1.0, 4.0, 5.0, 5.1, 8.0, 8.1]
    assert measures.until_next_token(times, 5.05) == pytest.approx(2.95)
    with pytest.raises(BenchError, match="nothing came"):
        measures.until_next_token(times, 8.5)


def test_a_stream_that_ends_before_the_kill_is_an_error(server: SuiteServer) -> None:
    with pytest.raises(BenchError, match=r"the stream had \d events, and its rank was to be killed after 20"):
        measures.killed_rank_s(server, ParallelSizes(killed_output=4))


def test_one_rank_alone_has_none_to_kill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measures, "COUNTED_S", 0.1)
    monkeypatch.setattr(SuiteServer, "members", lambda self: [])
    with pytest.raises(BenchError, match="no worker of this layout has several ranks"):
        measures.rank_pids(SuiteServer("http://127.0.0.1:1", 0.0))
