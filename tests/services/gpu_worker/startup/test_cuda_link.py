"""The order of copies and events on a GPU's streams, recorded with a fake torch.cuda."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from blockyard.services.gpu_worker.host_link import HostLink, SameMemory
from blockyard.services.gpu_worker.layers.cpu_offload import BUFFERS, HostWeights
from blockyard.services.gpu_worker.layers.linear import Linear, dense_linear
from blockyard.services.gpu_worker.loading import parallel_load
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.startup.cuda_link import CudaLink

CPU = torch.device("cpu")
Log = list[str]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Log:
    """What is called of torch.cuda, with names of streams and events; memory is not pinned."""
    log: Log = []
    events = iter(range(100))

    class Stream:
        def __init__(self, device: object = None, priority: int = 0) -> None: ...
        def wait_stream(self, stream: "Stream") -> None:
            log.append("stream waits for steps")

        def wait_event(self, event: "Event") -> None:
            log.append(f"steps wait for {event.name}")

        def synchronize(self) -> None:
            log.append("wait for stream")

    class Event:
        def __init__(self) -> None:
            self.name = next(events)

        def record(self, stream: Stream) -> None:
            log.append(f"record {self.name}")

        def synchronize(self) -> None:
            log.append(f"wait for {self.name}")

    @contextlib.contextmanager
    def use(stream: Stream) -> Iterator[None]:
        log.append("stream:")
        yield
        log.append("steps:")

    for name, fake in (("Stream", Stream), ("Event", Event), ("stream", use), ("current_stream", Stream)):
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: log.append("empty the cache"))
    monkeypatch.setattr(CudaLink, "host_tensor", SameMemory.host_tensor)
    return log


def table_of(link: HostLink) -> WeightTable:
    table = WeightTable(torch.float32, CPU)
    table.link = link
    return table


def test_a_matrix_is_copied_beside_the_steps_and_never_over_one_that_they_read(
    calls: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    linears = [dense_linear(torch.full((2, 2), float(i))) for i in range(BUFFERS + 2)]
    table = table_of(CudaLink(CPU))
    table.matrices_on_host = [linear.method.tensors()["weight"] for linear in linears]
    HostWeights(linears, table).install()
    products = []
    for i, linear in enumerate(linears):
        products.append(run(linear))
        calls.append(f"step is behind {i}")
    assert products == [2.0 * i for i in range(BUFFERS + 2)]
    copy = [["stream waits for steps", "stream:", f"record {i}", "steps:"] for i in range(BUFFERS + 2)]
    expected = copy[0] + copy[1]  # both buffers are filled before the first product
    for i in range(BUFFERS + 2):
        later = copy[i + BUFFERS] if i + BUFFERS < len(copy) else []
        expected += [f"steps wait for {i}", *later, f"step is behind {i}"]
    assert calls == expected


def run(linear: Linear) -> float:
    result: Tensor = linear(torch.ones(1, 2))
    return float(result[0, 0])


def test_a_buffer_of_a_reader_is_written_again_once_its_copy_is_complete(tmp_path: Path, calls: Log) -> None:
    save_file({"a": torch.arange(12.0)}, tmp_path / "a.safetensors")
    table, target = table_of(CudaLink(CPU)), torch.zeros(12)
    table.place("a", target, (12,))
    parallel_load.load([tmp_path / "a.safetensors"], table, lambda done: None, chunk_bytes=16)
    assert target.tolist() == list(range(12))
    chunks = [f"{what} {i % 2}" for i in range(3) for what in ("wait for", "record")]
    assert calls == ["stream:", *chunks, "steps:", "wait for stream", "empty the cache"]
