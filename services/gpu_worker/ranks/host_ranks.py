"""The processes of the ranks that one process of a host starts: the leader, or what stands for it on another host."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from blockyard.services.gpu_worker.parallel.commands import Answer, RankFailed, Sign
from blockyard.shared.errors import BlockyardError, ConfigError, DeviceError, LoadError, RankLostError
from blockyard.shared.messages.base import Frame
from blockyard.shared.process.frame_pipe import FramePipe

MODULE = "blockyard.services.gpu_worker.ranks.rank_start"
END_S = 2.0  # that a killed process may take to be gone
EXIT_S = 0.2  # until the exit code of a process that has closed its pipe is known
FAILURES: dict[int, type[BlockyardError]] = {one.exit_code: one for one in (ConfigError, LoadError)}


class HostRanks:
    """The processes live as long as this one. Each has a pipe for signs, and the leader's one for commands, too."""

    def __init__(self, folder: Path, num_ranks: int, environment: Mapping[str, str]) -> None:
        """folder: for files of this start. num_ranks: of the group. environment: of all processes."""
        self.folder = Path(tempfile.mkdtemp(prefix="ranks-", dir=folder))  # nobody else may enter
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self.signs: dict[int, FramePipe[Sign]] = {}
        self._num_ranks, self._environment = num_ranks, environment

    def start(self, rank: int, environment: Mapping[str, str], first: Frame) -> FramePipe[Answer]:
        """Starts a rank. environment: variables that differ from this process's. first: the first frame that it gets.

        Returns our end of the pipe for commands, on which the frame came.
        """
        pairs = [socket.socketpair() for _ in range(2)]
        theirs = [pair[1].fileno() for pair in pairs]
        path = os.pathsep.join(entry for entry in sys.path if entry)
        self.processes[rank] = subprocess.Popen(
            [sys.executable, "-P", "-m", MODULE, *map(str, (os.getpid(), *theirs))],
            stdin=subprocess.DEVNULL,
            env={**os.environ, **self._environment, "PYTHONPATH": path, **environment},
            pass_fds=theirs,
        )
        for pair in pairs:
            pair[1].close()
        self.signs[rank] = FramePipe(pairs[1][0], Sign)
        commands: FramePipe[Answer] = FramePipe(pairs[0][0], Answer)
        commands.send(first)
        return commands

    def error(self, rank: int, what: str, failed: RankFailed | None) -> BlockyardError:
        """Returns why the group ends. what: has happened to the rank. failed: what it said."""
        if failed is not None:
            kind = DeviceError if failed.is_of_device else FAILURES.get(failed.exit_code, RankLostError)
            return kind(f"rank {rank}: {failed.detail}")
        code = None
        if (process := self.processes.get(rank)) is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(EXIT_S)
        detail = what if code is None else f"{what} with code {code}"
        return RankLostError(f"rank {rank} of {self._num_ranks} {detail}; all ranks end")

    def kill(self) -> None:
        """Ends the processes at once."""
        for process in self.processes.values():
            process.kill()
        for process in self.processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
        shutil.rmtree(self.folder, ignore_errors=True)

    def close(self) -> None:
        """Nobody reads signs any more."""
        self.kill()
        for pipe in self.signs.values():
            pipe.close()
