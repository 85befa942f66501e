"""Costs of the ring: start-up, idle memory, token latency, events per core. Mock worker where models do not matter."""

import asyncio
import time
from pathlib import Path

from raw_client import raw_streams
from rig import Row, Server, completion, cpu_seconds, percentile, pss_mib, rss_mib, serve, streams, table

MOCK = ("demo", "--worker-cls", "mock")


def start_up() -> list[Row]:
    """Launch to the first token of the demo model; the first start fills the page cache and does not count."""
    seconds = []
    for _ in range(4):
        with serve("demo") as server:
            log = asyncio.run(streams(server.url, [completion(1)]))[0]
            seconds.append(log.events_s[0] - server.launched_s)
    text = f"{percentile(seconds[1:], 0.5):.1f} s (of three: {min(seconds[1:]):.1f} to {max(seconds[1:]):.1f})"
    return [("`blockyard serve demo` to the first token, warm file cache", text, "8 s")]


def idle_memory() -> list[Row]:
    """Resident memory of all services but the worker, after one request has passed through them."""
    with serve("demo") as server:
        asyncio.run(streams(server.url, [completion(8)]))
        time.sleep(2)
        found = {t: (rss_mib(p), loads_torch(p)) for t, p in server.children().items() if "gpu_worker" not in t}
        found["blockyard: launcher"] = (rss_mib(server.process.pid), loads_torch(server.process.pid))
    text = ", ".join(f"{t.removeprefix('blockyard: ')} {mib:.0f}" for t, (mib, _) in sorted(found.items()))
    torch = [t for t, (_, loaded) in found.items() if loaded]
    return [("idle services, MiB resident", f"{text}; torch in {torch or 'none'}", "70 each; none")]


def tokenizer_memory() -> list[Row]:
    """Memory of a tokenizer's own and of its processes' pages, shared ones counted once, as grammars need engines."""
    grammars = {
        "without a grammar": {},
        "after a schema": {
            "structured_outputs": {"json": {"type": "object", "properties": {"a": {"type": "integer"}}}}
        },
        "after one of xgrammar": {"structured_outputs": {"regex": "[a-c]+", "backend": "xgrammar"}},
    }
    found = []
    with serve("demo") as server:
        for when, fields in grammars.items():
            asyncio.run(streams(server.url, [completion(8, **fields)]))
            time.sleep(2)
            pids = [pid for pid, title in server.family().items() if "tokenizer_pool" in title]
            found.append(f"{when} {sum(map(pss_mib, pids)):.0f} ({len(pids)} processes)")
    return [("a tokenizer with its processes, MiB (PSS)", ", ".join(found), "")]


def loads_torch(pid: int) -> bool:
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


def token_way() -> list[Row]:
    """From the worker's stamp to the client's read: 32 streams at 20 ms a step."""
    with serve(*MOCK, "--mock-step-ms", "20") as server:
        bodies = [completion(200, return_stamps=True) for _ in range(32)]
        logs = raw_streams(server.url, bodies)
    lags = [at - chunk.stamp for log in logs for at, chunk in log.events()[2:] if chunk.stamp]
    text = f"p50 {1e3 * percentile(lags, 0.5):.2f} ms, p99 {1e3 * percentile(lags, 0.99):.2f} ms ({len(lags)} events)"
    return [("worker's stamp to client's read, 32 streams, 20 ms a step", text, "p50 3 ms, p99 8 ms")]


def events_a_core() -> list[Row]:
    """One gateway, 256 streams, an event a token, the mock as fast as it can: events per second of gateway CPU."""
    with serve(*MOCK, "--mock-step-ms", "0", "--max-num-seqs", "256") as server:
        gateway = find(server, "api_gateway")
        raw_streams(server.url, [completion(16)] * 256)
        before, start = cpu_seconds(gateway), time.perf_counter()
        logs = raw_streams(server.url, [completion(512)] * 256)
        cpu, wall = cpu_seconds(gateway) - before, time.perf_counter() - start
    events = sum(len(log.events()) for log in logs)
    text = f"{events / cpu:,.0f} events/s ({events:,} events, {cpu:.2f} s of CPU in {wall:.1f} s)"
    return [("one gateway, 256 streams, one event a token, per core", text, "50,000")]


def find(server: Server, title: str) -> int:
    return next(pid for name, pid in server.children().items() if title in name)


def ring_rows() -> list[Row]:
    return [*idle_memory(), *tokenizer_memory(), *start_up(), *token_way(), *events_a_core()]


if __name__ == "__main__":
    print(table(ring_rows()))
