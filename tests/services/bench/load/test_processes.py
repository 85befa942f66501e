"""Several client processes measure the same as one, and a failing process ends the run with its error."""

import asyncio
import socket
from collections.abc import Iterator

import msgspec
import pytest
from rig import serve as rig_serve

from blockyard.services.bench import serve as bench_serve
from blockyard.services.bench.load import client_process, processes
from blockyard.services.bench.load.client import Endpoint, LoadPlan, LoadRun
from blockyard.services.bench.load.monitor import CpuMonitor
from blockyard.services.bench.load.results import BenchError, RequestResult
from blockyard.services.bench.server import find


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with rig_serve("demo", "--worker-cls", "mock", "--mock-step-ms", "2") as server:
        yield server.url


def body(index: int) -> dict[str, object]:
    """Answers differ in length, by the index of their request."""
    asked = {"prompt": [300] * 5, "max_tokens": 2 + index, "ignore_eos": True, "temperature": 0.0, "stream": True}
    return asked | {"stream_options": {"include_usage": True}}


def run(endpoint: Endpoint, plan: LoadPlan, num: int) -> tuple[list[RequestResult], LoadRun]:
    load, asked = LoadRun(), [2 + i for i in range(len(plan.requests))]
    return asyncio.run(processes.run(endpoint, plan, asked, load, num))(), load


def test_answers_are_in_the_order_of_their_requests(url: str) -> None:
    endpoint = find(url, None).endpoint("completions")
    plan = LoadPlan([endpoint.request(body(i)) for i in range(7)], [0.02 * i for i in range(7)], max_concurrency=5)
    results, load = run(endpoint, plan, 3)
    assert [one.num_output for one in results] == [one.asked_output for one in results] == [2, 3, 4, 5, 6, 7, 8]
    assert not any(one.failure for one in results)
    assert (load.num_running, load.num_ended, load.num_refused) == (0, 7, 0)
    assert load.cpu_s() > 0 and load.exchanges == []  # the requests ran in other processes
    for i, one in enumerate(results):  # clocks of all processes are one clock; timers may be 1 ms early
        assert one.sent_s >= load.started_s + 0.02 * i - 0.002
        assert one.sent_s < one.tokens_s[0] <= one.ended_s <= load.ended_s


@pytest.mark.parametrize("num", [1, 3])
def test_the_cpu_time_is_that_of_the_run(url: str, num: int) -> None:
    """Of the busiest process: not of this one, which has used more before, nor of the imports of the others."""
    endpoint = find(url, None).endpoint("completions")
    plan, load = LoadPlan([endpoint.request(body(i)) for i in range(3)], [0.0, 0.1, 0.2]), LoadRun()
    cpu = CpuMonitor(load)

    async def measured() -> None:
        async with cpu:
            await processes.run(endpoint, plan, [2, 3, 4], load, num)

    asyncio.run(measured())
    assert 0 < cpu.cpu_share <= cpu.peak_cpu_share < 0.8, "most of the time is waiting"


def test_shares_are_whole() -> None:
    plan = LoadPlan([b"%d" % i for i in range(7)], [float(i) for i in range(7)], 5, 9.0)
    parts = [processes.part(plan, i, 3) for i in range(3)]
    assert [p.requests for p in parts] == [[b"0", b"3", b"6"], [b"1", b"4"], [b"2", b"5"]]
    assert [list(p.due_s) for p in parts] == [[0, 3, 6], [1, 4], [2, 5]]
    assert [p.max_concurrency for p in parts] == [2, 2, 1] and parts[0].timeout_s == 9.0


def test_the_number_of_processes_follows_the_load_and_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes.os, "sched_getaffinity", lambda _: range(16))
    assert [processes.num_for(n) for n in (1, 128, 129, 252, 1020, 9999)] == [1, 1, 2, 2, 4, 4]
    monkeypatch.setattr(processes.os, "sched_getaffinity", lambda _: range(2))
    assert processes.num_for(1020) == 1


def test_a_failing_process_ends_the_run() -> None:
    plan = LoadPlan([b"x", b"y"], [0.0, 0.0])
    with pytest.raises(BenchError, match=r"no\.such\.host\.invalid: "):
        run(Endpoint("no.such.host.invalid", 1), plan, 2)


def test_refused_connections_are_failures_of_their_requests() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        results, load = run(Endpoint("127.0.0.1", probe.getsockname()[1]), LoadPlan([b"x", b"y"], [0.0, 0.0]), 2)
    assert all("no connection" in one.failure for one in results)
    assert load.num_refused == 2


def test_messages_round_trip() -> None:
    work = client_process.ClientWork(
        Endpoint("h", 1, headers=(("a", "b"),)), LoadPlan([b"\x00\xff"], [1.5], None, 3.0), [4]
    )
    data = client_process.framed(work)
    assert int.from_bytes(data[:4], "big") == len(data) - 4
    assert msgspec.msgpack.decode(data[4:], type=client_process.ClientWork) == work
    done = client_process.ClientDone([RequestResult(1.0, 2.0, tokens_s=[1.5], failure="x")], 2.0)
    assert processes.decode(client_process.framed(done)[4:]) == done


def test_bench_serve_with_several(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--base-url", url, "--num-prompts", "6", "--input-len", "8", "--output-len", "4", "--ignore-eos"]
    assert bench_serve.main([*flags, "--client-processes", "2"]) == 0
    assert "6" in capsys.readouterr().out
