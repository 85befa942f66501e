"""Times kernels back to back in a CUDA graph, as a decode step runs them."""

import statistics
from collections.abc import Callable, Sequence

import torch

DEVICE = "cuda"
CACHE_BYTES = 256 << 20  # several times the L2 cache: rotating through so many bytes reads each input from memory
RUNS = 9
WARM_MS = 50.0  # of untimed replays first, until the clocks have risen
MOST_WARM = 1000


def copies(num_bytes: int, most: int = 64) -> int:
    """Returns the number of inputs of this size to rotate through so that none is still in the cache."""
    return max(2, min(most, -(-CACHE_BYTES // max(num_bytes, 1))))


def graph_seconds(calls: Sequence[Callable[[], object]]) -> float:
    """Returns seconds for each call, launch gaps included: the median of several replays of a graph of all calls."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compiles and allocates outside of the graph
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    first = replay_ms(graph)
    for _ in range(min(int(WARM_MS / max(first, 1e-3)), MOST_WARM)):
        graph.replay()
    return statistics.median(replay_ms(graph) for _ in range(RUNS)) / 1e3 / len(calls)


def replay_ms(graph: torch.cuda.CUDAGraph) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))
