"""Compile processes that end: the next kernel goes to a new one. `test_kernel_compiler.py` compiles kernels in them."""

import subprocess
import threading
from pathlib import Path
from queue import SimpleQueue

import pytest

from blockyard.services.gpu_worker.compilation import compile_processes
from blockyard.services.gpu_worker.compilation.compile_processes import CompileProcesses

# Answers each line with the process's id, and ends at the line "end" without an answer.
PROGRAM = """
import os, sys
for line in sys.stdin:
    if line == "end\\n":
        break
    print(os.getpid(), line.strip(), flush=True)
"""


def test_a_process_that_ended_is_closed_and_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "answer_lines.py").write_text(PROGRAM)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(compile_processes, "MODULE", "answer_lines")
    started: list[subprocess.Popen[str]] = []
    start = compile_processes.start_process

    def recorded_start() -> "subprocess.Popen[str]":
        started.append(start())
        return started[-1]

    monkeypatch.setattr(compile_processes, "start_process", recorded_start)
    answers: SimpleQueue[str] = SimpleQueue()
    processes = CompileProcesses(1)

    def compile_line(line: str) -> str:
        processes.submit(line, answers.put)
        return answers.get(timeout=30)

    assert compile_line("a") == f"{started[0].pid} a"
    assert compile_line("b") == f"{started[0].pid} b", "a process that runs is kept"
    assert compile_line("end") == "the compiling process ended"
    started[0].wait(30)
    assert compile_line("c") == f"{started[1].pid} c"
    processes.close()
    for thread in threading.enumerate():
        if thread.name == "compile-0":
            thread.join(30)
    assert len(started) == 2
    for process in started:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdin.closed and process.stdout.closed and process.returncode == 0
