"""Writes the time of each moment of a handover to a file of its process, for bench_handover_hops.py.

`install` patches a few methods when their modules are imported. Times are those of the monotonic clock, which all
processes of a host share.
"""

import functools
import importlib.abc
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

SERVICES = "blockyard.services"
# module, class, method, mark, whether the mark is made after the call, and which calls count
POINTS: list[tuple[str, str, str, str, bool, Callable[..., bool]]] = [
    ("gpu_worker.service", "Worker", "_answer", "prefilled", False, lambda self, done: bool(done.plan.sends)),
    ("kv_transfer.sender_link", "SenderLink", "_written", "written", False, lambda *args: True),
    ("kv_transfer.receiver", "TransferReceiver", "_written", "heard", False, lambda *args: True),
    ("kv_transfer.protocol.incoming", "IncomingTransfers", "on_landed", "landed", True, lambda *args: True),
    (
        "gpu_worker.session",
        "SchedulerSession",
        "answer_transfers",
        "told",
        True,
        lambda self, frames: has_ended(frames),
    ),
    ("scheduler.core", "Scheduler", "on_message", "known", False, lambda self, peer, frame, now: has_ended([frame])),
    ("scheduler.outbox", "Outbox", "plan", "planned", False, lambda self, worker, plan: bool(plan.starts)),
    ("gpu_worker.session", "SchedulerSession", "_take", "received", False, lambda self, peer, plan: bool(plan.starts)),
    ("gpu_worker.runner", "Runner", "launch", "launched", True, lambda self, plan: bool(plan.starts)),
    ("gpu_worker.mock.runner", "MockRunner", "launch", "launched", True, lambda self, plan: bool(plan.starts)),
    ("gpu_worker.service", "Worker", "_answer", "computed", False, lambda self, done: bool(done.plan.starts)),
]


def has_ended(frames: Sequence[Any]) -> bool:
    return any(type(frame).__name__ == "KVLanded" and frame.is_ended for frame in frames)


def install(folder: Path) -> None:
    sys.meta_path.insert(0, Marker(folder))


class Marker(importlib.abc.MetaPathFinder):
    """Patches the classes of POINTS as they are imported."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: Any = None
        self._modules = {f"{SERVICES}.{point[0]}" for point in POINTS}

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in self._modules:
            return None
        self._modules.remove(name)
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        run = spec.loader.exec_module

        def run_and_patch(module: ModuleType) -> None:
            run(module)
            for point in POINTS:
                if name == f"{SERVICES}.{point[0]}":
                    self._patch(getattr(module, point[1]), *point[2:])

        spec.loader.exec_module = run_and_patch  # type: ignore[method-assign]
        return spec

    def _patch(self, cls: type, method: str, mark: str, is_after: bool, counts: Callable[..., bool]) -> None:
        inner = getattr(cls, method)

        @functools.wraps(inner)
        def call(*args: Any) -> Any:
            is_counted = counts(*args)
            if is_counted and not is_after:
                self._write(mark)
            result = inner(*args)
            if is_counted and is_after:
                self._write(mark)
            return result

        setattr(cls, method, call)

    def _write(self, mark: str) -> None:
        if self._file is None:
            self._file = (self._folder / f"{os.getpid()}.marks").open("a", buffering=1)
        self._file.write(f"{time.monotonic():.6f} {mark}\n")
