"""Ranks of a host divide the kernels that they record."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from triton import knobs
from triton.backends.compiler import GPUTarget

from blockyard.services.gpu_worker.compilation import compile_processes
from blockyard.services.gpu_worker.compilation.compile_processes import CompileProcesses, OnCompiled, num_processes
from blockyard.services.gpu_worker.compilation.kernel_claims import KernelClaims
from blockyard.services.gpu_worker.compilation.kernel_compiler import KernelCompiler


class ListedProcesses(CompileProcesses):
    """Starts none: lists what would be compiled."""

    def __init__(self) -> None:
        super().__init__(2)
        self.lines = list[str]()

    def submit(self, line: str, done: OnCompiled) -> None:
        self.lines.append(line)
        done("")


class RecordingRank:
    def __init__(self, folder: Path) -> None:
        self.processes = ListedProcesses()
        self._compiler = KernelCompiler(self.processes, GPUTarget("cuda", 90, 32), folder)

    def record(self, names: str, claims: KernelClaims | None) -> None:
        """Launches a kernel of each name, which Triton has not compiled yet, and waits for those of this rank."""
        with self._compiler.recording(claims):
            hook: Any = knobs.runtime.jit_cache_hook
            for name in names:
                kernel = SimpleNamespace(jit_function=SimpleNamespace(cache_key=name))
                assert hook(key="", fn=kernel, compile={"specialization_data": f'{{"name": "{name}"}}'})
        assert self._compiler.wait(1.0)

    @property
    def compiled(self) -> list[str]:
        return [line[10] for line in self.processes.lines]


def test_each_kernel_is_compiled_by_one_rank(tmp_path: Path) -> None:
    claims, ranks = tmp_path / "claims", [RecordingRank(tmp_path / f"cache-{rank}") for rank in range(2)]
    of_each = [KernelClaims(claims) for _ in ranks]
    ranks[0].record("ab", of_each[0])
    ranks[1].record("cbad", of_each[1])
    ranks[0].record("acde", of_each[0])
    assert [rank.compiled for rank in ranks] == [["a", "b", "e"], ["c", "d"]]
    ranks[0].record("cf", None)
    assert ranks[0].compiled == ["a", "b", "e", "c", "f"], "without claims a rank compiles what it needs"


def test_processes_follow_cores_ranks_and_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process takes seconds to import Triton: one kernel starts one."""
    assert [num_processes(24, sharers) for sharers in (1, 2, 4, 100)] == [12, 6, 3, 1]
    monkeypatch.setattr(compile_processes, "start_process", lambda: None)
    monkeypatch.setattr(CompileProcesses, "_serve", lambda self: None)
    processes = CompileProcesses(3)
    found = []
    for _ in range(5):
        processes.submit("{}", lambda problem: None)
        found.append(processes.num)
    assert found == [1, 2, 3, 3, 3]
    started = CompileProcesses(3)
    started.start()
    assert started.num == 3
