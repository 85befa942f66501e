"""An agent of the package nixl, and a thread that calls it.

Calls of an agent take time: a write over shared memory or CMA copies all its bytes before it returns. An agent belongs
to one thread, because it is not safe for several. nixl's own progress thread is off: in 1.5.1 it keeps a core busy.

Destroying an agent is the one call after which its memory is certainly not accessed by other hosts any more. Bytes of a
sender that has died can still be in a TCP socket, and the receiver's UCX copies them into memory whenever it makes
progress, also after `deregister_memory`. A posted write cannot be taken back either.
"""

import logging
import os
import queue
import struct
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from blockyard.services.kv_transfer.arena import Arena
from blockyard.shared.errors import ConfigError

log = logging.getLogger(__name__)

DEFAULT_BACKENDS = ("UCX",)

TOKEN_BYTES = 16

Job = Callable[[], None]
Pieces = npt.NDArray[np.uint64]  # [n, 3]: address, bytes, device


@dataclass(frozen=True, slots=True)
class Region:
    """Memory that an agent registers."""

    address: int
    num_bytes: int
    kind: Literal["DRAM", "VRAM"] = "DRAM"
    device: int = 0

    def use_device(self) -> None:
        """Makes the CUDA context of GPU memory this thread's, as UCX needs it."""
        if self.kind == "VRAM":
            torch.cuda.set_device(self.device)

    def piece(self, offset: int, num_bytes: int) -> Pieces:
        return np.array([[self.address + offset, num_bytes, self.device]], np.uint64)


class NixlTarget(msgspec.Struct, frozen=True, array_like=True, tag="staging"):
    """What a sender needs to write to its buffers in a receiver's staging memory."""

    metadata: bytes  # of its agent
    address: int  # of the first buffer
    num_buffers: int
    buffer_bytes: int
    kind: str
    device: int
    token_address: int
    token: bytes  # a new link reads it, to try the connection
    boot: str
    pid_namespace: int


_PLACE = struct.Struct("<QQ")


@dataclass(frozen=True, slots=True)
class Place:
    """A buffer of the receiver's staging memory to which a sender has written, sent beside a `BlocksWritten`. The
    receiver sends it back when the sender may write to it again.
    """

    use: int  # counts all uses of a link's buffers, from 1
    buffer: int

    def bytes(self) -> bytes:
        return _PLACE.pack(self.use, self.buffer)

    @staticmethod
    def read(payload: memoryview | None) -> "Place | None":
        """Returns None for bytes that are no place."""
        if payload is None or payload.nbytes != _PLACE.size:
            return None
        return Place(*_PLACE.unpack(payload))


def error_of(work: Job) -> str:
    """Returns nixl's error, "" for none. Not the exception, because an agent that is destroyed may not be in use."""
    try:
        work()
    except (ConnectionError, ConfigError) as e:
        return str(e)
    return ""


def region_at(arena: Arena, address: int) -> Region:
    """address: of the arena's memory, which a host arena has mapped more than once."""
    num_bytes = arena.bytes.numel()
    return Region(address, num_bytes) if arena.gpu is None else Region(address, num_bytes, "VRAM", arena.gpu)


def host_id() -> tuple[str, int]:
    """Returns this boot of the host, and the PID namespace: in it processes can write to each other's addresses."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.stat("/proc/self/ns/pid").st_ino


def nixl_package() -> Any:
    """Raises ConfigError if it is not installed."""
    raises = logging.raiseExceptions  # it changes this setting of all of logging
    try:
        # an optional package, of 0.3 s
        from blockyard.services.kv_transfer.connectors.nixl_import import package  # noqa: PLC0415
    except ModuleNotFoundError as e:
        raise ConfigError("the KV connector nixl needs the package nixl: pip install nixl-cu13") from e
    finally:
        logging.raiseExceptions = raises
    return _quiet(package)


def _quiet(package: Any) -> Any:
    """Its log lines go to our log handlers, without a line for each new agent."""
    logger = logging.getLogger("nixl")
    logger.handlers.clear()
    logger.propagate = True
    logger.setLevel(logging.WARNING)
    return package


class NixlAgent:
    """One agent with its registered memory. Its methods raise ConnectionError if nixl reports an error."""

    def __init__(self, name: str, backends: Sequence[str], regions: Sequence[Region]) -> None:
        """backends: plugins of nixl; empty: UCX. Raises ConfigError for a backend that is not there."""
        package, wanted = nixl_package(), list(backends or DEFAULT_BACKENDS)
        config = package.nixl_agent_config(enable_prog_thread=False, backends=wanted)
        self._agent: Any = _call("agent", package.nixl_agent, name, config)
        self._handles: set[Any] = set()  # of copies in flight
        self._peer: bytes | str = ""
        missing = [backend for backend in wanted if backend not in self._agent.backends]
        if missing:
            there = ", ".join(self._agent.get_plugin_list())
            raise ConfigError(f"the KV connector nixl has no backend {missing[0]}: use one of {there}")
        for it in regions:
            described = [(it.address, it.num_bytes, it.device, "")]
            _call("register_memory", self._agent.register_memory, described, it.kind)

    def metadata(self) -> bytes:
        """Returns what another agent needs to write to the registered memory."""
        return bytes(_call("get_agent_metadata", self._agent.get_agent_metadata))

    def connect(self, metadata: bytes) -> None:
        """metadata: of the one agent that `start` accesses. The connection is made with the first copy."""
        self._peer = _call("add_remote_agent", self._agent.add_remote_agent, metadata)

    def start(
        self, operation: Literal["READ", "WRITE"], own: Pieces, own_kind: str, theirs: Pieces, their_kind: str
    ) -> object:
        """Starts a copy between pieces of equal sizes. Call `is_done` with the result until it returns True."""
        lists = self._agent.get_xfer_descs(own, own_kind), self._agent.get_xfer_descs(theirs, their_kind)
        handle = _call("initialize_xfer", self._agent.initialize_xfer, operation, *lists, self._peer)
        self._handles.add(handle)
        _is_done(_call("transfer", self._agent.transfer, handle))
        return handle

    def is_done(self, handle: object) -> bool:
        """Whether a copy is complete, as nixl says. Moves all copies on."""
        if not _is_done(_call("check_xfer_state", self._agent.check_xfer_state, handle)):
            return False
        self._handles.discard(handle)
        _call("release_xfer_handle", self._agent.release_xfer_handle, handle)
        return True

    def progress(self) -> None:
        """Answers other agents: they cannot connect without it, and over TCP not write."""
        _call("get_new_notifs", self._agent.get_new_notifs)

    def destroy(self) -> None:
        """Ends all copies. The registered memory is not accessed any more, except by processes of this host.

        No handle of `start` and no error may be kept. Raises RuntimeError otherwise: memory may still be accessed.
        """
        while self._handles:
            handle = self._handles.pop()
            try:
                _call("release_xfer_handle", self._agent.release_xfer_handle, handle)
            except ConnectionError as e:
                log.debug("a copy in flight: %s", e)
            del handle
        alive, self._agent = weakref.ref(self._agent.agent), None
        if alive() is not None:
            raise RuntimeError("an agent of nixl is still in use")


def _call(what: str, function: Callable[..., Any], *args: Any) -> Any:
    """Raises ConnectionError for any error of nixl."""
    try:
        return function(*args)
    except Exception as e:  # noqa: BLE001 - nixl's errors have no common base
        text = f"nixl {what}: {e or type(e).__name__}"
    del function, args  # the traceback must not keep the agent
    raise ConnectionError(text)


def _is_done(state: str) -> bool:
    if state not in ("DONE", "PROC"):
        raise ConnectionError(f"nixl: a copy is in state {state}")
    return state == "DONE"


class AgentThread:
    """Runs jobs in order on a thread of its own, and calls `turn` after each and whenever that has asked for it."""

    def __init__(self, name: str, turn: Callable[[], float | None]) -> None:
        """turn: returns the seconds until its next call; None for after the next job. It must not raise."""
        self._turn = turn
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """job: must not raise."""
        self._jobs.put(job)

    def stop(self) -> None:
        """The thread ends after the jobs that it has."""
        self._jobs.put(None)

    def join(self, timeout_s: float) -> bool:
        """Waits for the end of the thread. Returns False if it goes on."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        wait_s: float | None = None
        while True:
            try:
                job = self._jobs.get(timeout=wait_s)
            except queue.Empty:
                pass
            else:
                if job is None:
                    return
                job()
                del job  # the thread keeps no reference while it waits
            wait_s = self._turn()
