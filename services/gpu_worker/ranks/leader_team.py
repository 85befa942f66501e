"""The leader's side of its followers: starts those of its host, sends commands to all, and ends with them. No torch."""

import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from blockyard.services.gpu_worker.parallel.commands import (
    AdapterRead,
    Answer,
    Begin,
    Followers,
    GroupComplete,
    RankFailed,
    RankSetup,
    Sign,
    TransferAnswer,
)
from blockyard.services.gpu_worker.parallel.meeting import Meeting
from blockyard.services.gpu_worker.parallel.stages import place_of
from blockyard.services.gpu_worker.ranks.entrance import JoinedRank, RankEntrance
from blockyard.services.gpu_worker.ranks.host_ranks import HostRanks
from blockyard.services.gpu_worker.ranks.signs import SILENT_S, RankSigns
from blockyard.shared.bus.frame_links import FrameEnd
from blockyard.shared.bus.poller import Readable
from blockyard.shared.config.services.worker import WorkerConfig
from blockyard.shared.errors import BlockyardError, DeviceError, RankLostError
from blockyard.shared.messages import RankStats
from blockyard.shared.messages.base import Frame
from blockyard.shared.process.service_main import rss_bytes

if TYPE_CHECKING:
    from blockyard.services.gpu_worker.parallel.team import Connect, RankGroups

# multicast of NVLink fails where one process may not see all GPUs of a host
ENVIRONMENT = {
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_GRAPH_REGISTER": "0",  # graphs share memory that others free: a registration of it may hang a replay
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",  # each rank sees its own GPU alone, as number 0
    "NCCL_SOCKET_IFNAME": "lo",
}
HEARD_S = 3.0  # in which ranks of other hosts read why this process ends
_encode = msgspec.msgpack.Encoder().encode

OnEnd = Callable[[BlockyardError], None]


class LeaderTeam:
    """Implements `RankTeam`. The processes that it starts live as long as this one; others join it."""

    def __init__(
        self, config: WorkerConfig, folder: Path, on_end: OnEnd, environment: Mapping[str, str] = ENVIRONMENT
    ) -> None:
        """folder: for files of this start. on_end: called in a thread when a rank is gone; must end this process.

        environment: of the ranks that are started here.
        """
        self.place = place_of(0, config.tensor_parallel_size, config.pipeline_parallel_size)
        self._config, self._on_end = config, on_end
        self._host = HostRanks(folder, self.place.num_ranks, environment)
        self.folder = self._host.folder
        self._meeting = Meeting(self.folder)
        self.failure = ""  # why the device of a follower has failed
        self._commands: dict[int, FrameEnd[Answer]] = {}
        self._pids: dict[int, int] = {}
        self._entrance: RankEntrance | None = None
        self._is_failing, self._heard = False, threading.Event()
        self._watch: RankSigns | None = None
        self._groups: RankGroups | None = None
        self._stage_layers: list[int] = []  # empty: there is one stage
        self.replica_folder = self.replica_store = ""  # see `Begin`
        self._of_adapters: list[tuple[int, AdapterRead]] = []  # answers that were read and not taken
        self._of_transfers: list[tuple[int, TransferAnswer]] = []

    def start(self, environments: Mapping[int, Mapping[str, str]]) -> None:
        """Starts the other ranks of this host. environments: by rank, variables that differ from this process's.

        Ranks that are elsewhere must have joined by `join`, which then watches all.
        """
        for rank in self._config.host_ranks[1:]:
            setup = RankSetup(self._config, rank, str(self.folder), os.getpid())
            pipe = self._host.start(rank, environments.get(rank, {}), setup)
            pipe.socket.settimeout(SILENT_S)  # a follower that takes no commands for so long hangs
            self._commands[rank] = pipe
            self._pids[rank] = self._host.processes[rank].pid
        if len(self._config.host_ranks) == self.place.num_ranks:
            self._start_watch(self._host.signs)

    def join(self, entrance: RankEntrance, joined: Mapping[int, JoinedRank], meeting: Meeting) -> None:
        """Ranks that this process has not started are in the group: they know where torch's store is.

        meeting: of this process. The entrance is closed with the group.
        """
        self._entrance, self._meeting = entrance, meeting
        self.send(GroupComplete(meeting.store))  # to those of this host
        for rank, one in joined.items():
            self._commands[rank], self._pids[rank] = one.commands, one.pid
        entrance.complete(meeting.store)
        self._start_watch({**self._host.signs, **{rank: one.signs for rank, one in joined.items()}})

    def _start_watch(self, signs: Mapping[int, FrameEnd[Sign]]) -> None:
        self._watch = RankSigns(signs, self._lost)
        self._watch.start()

    def divide(self, decide: Callable[[], list[int]]) -> list[int]:
        self._stage_layers = decide()
        return self._stage_layers

    def connect(self, connect: "Connect") -> "RankGroups":
        """Implements `RankTeam`. Followers start to load, again if they have before."""
        self.send(Begin(self._stage_layers, self.replica_folder, self.replica_store))
        if self._groups is None:
            self._groups = connect(self.place, self._meeting)
        return self._groups

    def send(self, frame: Frame, to: Followers = Followers.ALL) -> None:
        """Implements `SendCommand`."""
        body = b""
        for rank, pipe in self._commands.items():
            if to is not Followers.ALL and (rank < self.place.shard.size) != (to is Followers.LAST_STAGE):
                continue
            body = body or _encode(frame)
            try:
                pipe.send_encoded(body)
            except OSError as e:
                raise RankLostError(f"rank {rank} takes no commands: {e.strerror or e}") from e

    @property
    def followers(self) -> list[int]:
        """Implements `TransferFollowers`."""
        return list(self._commands)

    @property
    def answers(self) -> list[Readable]:
        """Implements `TransferFollowers`."""
        return list(dict.fromkeys(source for pipe in self._commands.values() for source in pipe.sources))

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
        for rank, pid in self._pids.items():
            silent_s, held = (0.0, 0) if self._watch is None else self._watch.last(rank)
            found.append(RankStats(rank, pid, held, round(silent_s, 3)))
        return found

    def serve(self) -> None:
        """The start is over."""
        if self._watch is not None:
            self._watch.serve()

    def fail(self, error: BlockyardError) -> None:
        """Tells ranks that this process has not started why it ends: they would start again to look for it."""
        if self._watch is not None and self._entrance is not None:
            self._is_failing = True
            self._watch.say(RankFailed(str(error), error.exit_code))
            self._heard.wait(HEARD_S)

    def close(self) -> None:
        """Ends the other ranks."""
        if self._watch is not None:
            self._watch.stop()
        self._host.close()
        for pipe in self._commands.values():
            pipe.close()
        if self._entrance is not None:
            self._entrance.close()

    def _lost(self, rank: int, what: str, failed: RankFailed | None) -> None:
        if self._is_failing:
            self._heard.set()
            return
        error = self._host.error(rank, what, failed)
        if isinstance(error, DeviceError):
            self.failure = str(error)
        self._host.kill()
        if self._entrance is not None:
            self._entrance.close_signs()
        self._on_end(error)
