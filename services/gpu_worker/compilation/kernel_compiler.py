"""Compiles Triton kernels in parallel processes, so that the first start of a worker does not compile one by one.

While `KernelCompiler.recording` is active, a launched kernel does not run. Its source and types go to one of
`CompileProcesses`, which puts the binary into Triton's cache on disk for later launches. A file in that cache lists
compiled kernels, so that a later start starts no process. The worker compiles other kernels at their first launch.
Imports Triton.
"""

import contextlib
import hashlib
import json
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from blockyard.services.gpu_worker.compilation.compile_processes import LIST, CompileProcesses
from blockyard.services.gpu_worker.compilation.kernel_claims import KernelClaims

log = logging.getLogger(__name__)

FOLDER = "folder="  # line of the list with the cache's folder when Triton wrote its paths


class CompiledList:
    """The kernels in the cache folder, by a hash of source and specialization."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._path, self._lock = folder, folder / LIST, threading.Lock()
        try:
            words = self._path.read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError):
            words = []
        self._keys = set(words)
        before = [word.removeprefix(FOLDER) for word in words if word.startswith(FOLDER)]
        if before and before[-1] != str(folder):
            self._move()
        if not before or before[-1] != str(folder):
            self.add(FOLDER + str(folder))

    def __contains__(self, key: str) -> bool:
        return key in self._keys

    def add(self, key: str) -> None:
        """If the folder cannot be written, the next start compiles again."""
        with self._lock:
            self._keys.add(key)
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(f"{key}\n")
            except OSError as e:
                log.warning("%s cannot be written, the next start compiles again: %s", self._path, e)

    def _move(self) -> None:
        """Rewrites the absolute paths in Triton's groups, after the folder was moved."""
        try:
            for group in self._folder.glob("*/__grp__*.json"):
                paths: dict[str, str] = json.loads(group.read_bytes())["child_paths"]
                moved = {name: str(group.parent / Path(path).name) for name, path in paths.items()}
                group.write_text(json.dumps({"child_paths": moved}))
        except (OSError, ValueError, KeyError) as e:
            log.warning("%s was copied and cannot be used, kernels are compiled anew: %s", self._folder, e)
            self._keys.clear()


class KernelCompiler:
    """Records launched kernels and has them compiled."""

    def __init__(
        self, processes: CompileProcesses, target: GPUTarget | None = None, folder: Path | None = None
    ) -> None:
        """target: None takes the current GPU's. folder: Triton's cache, None takes the configured one."""
        self._processes, self._target = processes, target or driver.active.get_current_target()
        self._compiled = CompiledList(folder or Path(knobs.cache.dir))
        self._seen: set[str] = set()
        self._changed = threading.Condition()
        self._num_done, self._began_s = 0, 0.0
        self._claims: KernelClaims | None = None

    @contextlib.contextmanager
    def recording(self, claims: KernelClaims | None = None) -> Iterator[None]:
        """Kernels launched inside are compiled and do not run, even if they ran before: their outputs are undefined.

        claims: kernels that another rank has claimed are left to it; None: this one compiles all.
        """
        assert knobs.runtime.jit_cache_hook is None, "Triton has one hook"
        self._claims = claims
        run = JITFunction.run

        def only_compile(function: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            return run(function, *args, grid=grid, warmup=True, **options)

        knobs.runtime.jit_cache_hook = self._record
        JITFunction.run = only_compile
        try:
            yield
        finally:
            JITFunction.run = run
            knobs.runtime.jit_cache_hook = None

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until all recorded kernels are compiled or have failed. False: not after this time."""
        with self._changed:
            return self._changed.wait_for(lambda: self._num_done == len(self._seen), timeout_s)

    def has_compiled(self, key: str) -> bool:
        """Whether all kernels of `key` were compiled before."""
        return key in self._compiled

    def mark_compiled(self, key: str) -> None:
        self._compiled.add(key)

    def describe(self) -> str:
        if not self._num_done:
            return "kernels: compiled before"
        took_s = time.perf_counter() - self._began_s
        return f"kernels: {self._num_done} compiled in {self._processes.num} processes in {took_s:.1f} s"

    def close(self) -> None:
        """Ends the processes. No kernel may be recorded after this."""
        self._processes.close()

    def _record(self, *, key: str, fn: Any, compile: dict[str, Any], **_: object) -> bool:
        """Triton's hook before it compiles. True: Triton does not compile."""
        source = f"{triton.__version__} {self._target} {fn.jit_function.cache_key} {key}"
        digest = hashlib.sha256(source.encode()).hexdigest()
        with self._changed:
            if digest in self._seen or digest in self._compiled:
                return True
            if self._claims is not None and not self._claims.take(digest):
                return True
            self._seen.add(digest)
            self._began_s = self._began_s or time.perf_counter()
        target = (self._target.backend, self._target.arch, self._target.warp_size)
        line = json.dumps({**json.loads(compile["specialization_data"]), "gpu": target})
        self._processes.submit(line, lambda problem: self._done(digest, problem))
        return True

    def _done(self, digest: str, problem: str) -> None:
        if problem:
            log.warning("a kernel could not be compiled ahead: %s", problem)
        else:
            self._compiled.add(digest)
        with self._changed:
            self._num_done += 1
            self._changed.notify_all()
