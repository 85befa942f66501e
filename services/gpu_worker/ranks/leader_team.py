"""The leader's side of its followers: starts their processes, sends them commands, and ends with them. No torch."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from blockyard.services.gpu_worker.parallel.commands import (
    AdapterRead,
    Answer,
    Begin,
    Followers,
    RankFailed,
    RankSetup,
    Sign,
    TransferAnswer,
)
from blockyard.services.gpu_worker.parallel.stages import place_of
from blockyard.services.gpu_worker.ranks.signs import SILENT_S, RankSigns
from blockyard.shared.config.services.worker import WorkerConfig
from blockyard.shared.errors import BlockyardError, ConfigError, DeviceError, LoadError, RankLostError
from blockyard.shared.messages import RankStats
from blockyard.shared.messages.base import Frame
from blockyard.shared.process.frame_pipe import FramePipe
from blockyard.shared.process.service_main import rss_bytes

if TYPE_CHECKING:
    from blockyard.services.gpu_worker.parallel.team import Connect, RankGroups

MODULE = "blockyard.services.gpu_worker.ranks.rank_process"
END_S = 2.0  # that a killed process may take to be gone
# multicast of NVLink fails where one process may not see all GPUs of a host
ENVIRONMENT = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",  # each rank sees its own GPU alone, as number 0
    "NCCL_SOCKET_IFNAME": "lo",
}
FAILURES: dict[int, type[BlockyardError]] = {one.exit_code: one for one in (ConfigError, LoadError)}

_encode = msgspec.msgpack.Encoder().encode

OnEnd = Callable[[BlockyardError], None]


class LeaderTeam:
    """Implements `RankTeam`. The processes live as long as this one."""

    def __init__(self, config: WorkerConfig, folder: Path, on_end: OnEnd) -> None:
        """folder: for files of this start. on_end: called in a thread when a rank is gone; must end this process."""
        self.place = place_of(0, config.tensor_parallel_size, config.pipeline_parallel_size)
        self._config, self._on_end = config, on_end
        self.folder = Path(tempfile.mkdtemp(prefix="ranks-", dir=folder))  # nobody else may enter
        self.failure = ""  # why the device of a follower has failed
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._commands: dict[int, FramePipe[Answer]] = {}
        self._signs: dict[int, FramePipe[Sign]] = {}
        self._watch: RankSigns | None = None
        self._groups: RankGroups | None = None
        self._stage_layers: list[int] = []  # empty: there is one stage
        self._of_adapters: list[tuple[int, AdapterRead]] = []  # answers that were read and not taken
        self._of_transfers: list[tuple[int, TransferAnswer]] = []

    def start(self, environments: Mapping[int, Mapping[str, str]]) -> None:
        """Starts the other ranks. environments: by rank, variables that differ from this process's."""
        for rank in range(1, self.place.num_ranks):
            self._start(rank, environments.get(rank, {}))
        self._watch = RankSigns(self._signs, self._lost)
        self._watch.start()

    def _start(self, rank: int, environment: Mapping[str, str]) -> None:
        pairs = [socket.socketpair() for _ in range(2)]
        theirs = [pair[1].fileno() for pair in pairs]
        path = os.pathsep.join(entry for entry in sys.path if entry)
        self._processes[rank] = subprocess.Popen(
            [sys.executable, "-P", "-m", MODULE, *map(str, theirs)],
            stdin=subprocess.DEVNULL,
            env={**os.environ, **ENVIRONMENT, "PYTHONPATH": path, **environment},
            pass_fds=theirs,
        )
        for pair in pairs:
            pair[1].close()
        pairs[0][0].settimeout(SILENT_S)  # a follower that takes no commands for so long hangs
        self._commands[rank] = FramePipe(pairs[0][0], Answer)
        self._signs[rank] = FramePipe(pairs[1][0], Sign)
        self._commands[rank].send(RankSetup(self._config, rank, str(self.folder), os.getpid()))

    def divide(self, decide: Callable[[], list[int]]) -> list[int]:
        """Implements `RankTeam`."""
        self._stage_layers = decide()
        return self._stage_layers

    def connect(self, connect: "Connect") -> "RankGroups":
        """Implements `RankTeam`. Followers start to load, again if they have before."""
        self.send(Begin(self._stage_layers))
        if self._groups is None:
            self._groups = connect(self.place, self.folder)
        return self._groups

    def send(self, frame: Frame, to: Followers = Followers.ALL) -> None:
        """Implements `SendCommand`."""
        data = b""
        for rank, pipe in self._commands.items():
            if to is not Followers.ALL and (rank < self.place.shard.size) != (to is Followers.LAST_STAGE):
                continue
            data = data or _encode(frame)
            try:
                pipe.send_encoded(data)
            except OSError as e:
                raise RankLostError(f"rank {rank} takes no commands: {e.strerror or e}") from e

    @property
    def followers(self) -> list[int]:
        """Implements `TransferFollowers`."""
        return list(self._commands)

    @property
    def answers(self) -> list[int]:
        """Implements `TransferFollowers`."""
        return [pipe.socket.fileno() for pipe in self._commands.values()]

    def take_answers(self) -> list[tuple[int, TransferAnswer]]:
        """Implements `TransferFollowers`."""
        self._read_answers()
        found, self._of_transfers = self._of_transfers, []
        return found

    def take_adapter_answers(self) -> list[tuple[int, AdapterRead]]:
        """Implements `AdapterFollowers`."""
        self._read_answers()
        found, self._of_adapters = self._of_adapters, []
        return found

    def wait_answer(self, rank: int) -> TransferAnswer:
        """Implements `TransferFollowers`."""
        while (place := next((i for i, one in enumerate(self._of_transfers) if one[0] == rank), None)) is None:
            self._read_answer(rank)
        return self._of_transfers.pop(place)[1]

    def _read_answers(self) -> None:
        """Reads all that has come."""
        for rank, pipe in self._commands.items():
            while pipe.is_readable:
                self._read_answer(rank)

    def _read_answer(self, rank: int) -> None:
        try:
            answer = self._commands[rank].receive()
        except TimeoutError:
            raise RankLostError(f"rank {rank} does not answer") from None
        if answer is None:
            raise RankLostError(f"rank {rank} has ended")
        if isinstance(answer, AdapterRead):
            self._of_adapters.append((rank, answer))
        else:
            self._of_transfers.append((rank, answer))

    def stats(self) -> list[RankStats]:
        """Implements `WorkerRanks`."""
        found = [RankStats(0, os.getpid(), rss_bytes())]
        for rank, process in self._processes.items():
            silent_s, held = (0.0, 0) if self._watch is None else self._watch.last(rank)
            found.append(RankStats(rank, process.pid, held, round(silent_s, 3)))
        return found

    def serve(self) -> None:
        """The start is over."""
        if self._watch is not None:
            self._watch.serve()

    def close(self) -> None:
        """Ends the other ranks."""
        if self._watch is not None:
            self._watch.stop()
        self._kill()
        for one in [pipe.socket for pipe in self._commands.values()] + [pipe.socket for pipe in self._signs.values()]:
            one.close()

    def _lost(self, rank: int, what: str, failed: RankFailed | None) -> None:
        process = self._processes[rank]
        if failed is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.2)
        code = process.returncode
        detail = what if code is None else f"{what} with code {code}"
        error: BlockyardError = RankLostError(f"rank {rank} of {self.place.num_ranks} {detail}; all ranks end")
        if failed is not None:
            error = FAILURES.get(failed.exit_code, RankLostError)(f"rank {rank}: {failed.detail}")
        if failed is not None and failed.is_of_device:
            error = DeviceError(f"rank {rank}: {failed.detail}")
            self.failure = str(error)
        self._kill()
        self._on_end(error)

    def _kill(self) -> None:
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
        shutil.rmtree(self.folder, ignore_errors=True)
