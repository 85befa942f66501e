"""The leader's side of ranks that Ray starts. Imports neither Ray nor torch.

1. `place_ranks` waits until there is room for all of them.
2. Leaders of replicas that have the experts together then tell each other which hosts their ranks are on.
3. `wait_for_ray` starts the ranks, and waits until they have joined.
"""

import logging
import os
import secrets
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec

from blockyard.services.gpu_worker.child_processes.start import start_child
from blockyard.services.gpu_worker.parallel.meeting import LOOPBACK, Meeting
from blockyard.services.gpu_worker.ranks import network
from blockyard.services.gpu_worker.ranks.entrance import RankEntrance
from blockyard.services.gpu_worker.ranks.group_digest import make_digest
from blockyard.services.gpu_worker.ranks.joining import RankTicket
from blockyard.services.gpu_worker.ranks.leader_team import LeaderTeam
from blockyard.services.gpu_worker.ranks.ray_group.frames import (
    Answer,
    PlaceRanks,
    RanksFailed,
    RanksPlaced,
    StartRanks,
)
from blockyard.shared.bus.curve import new_keys
from blockyard.shared.config.services.process import BusConfig
from blockyard.shared.config.services.worker import RayConfig, WorkerConfig
from blockyard.shared.errors import BlockyardError, ConfigError, LoadError, RankLostError
from blockyard.shared.process.frame_pipe import FramePipe

log = logging.getLogger(__name__)

MODULE = ("-m", "blockyard.services.gpu_worker.ranks.ray_group.placement_process")
HANDED_ON = ("CUDA_", "GLOO_", "LRU_", "NCCL_", "OMP_", "ONEDNN_", "TORCH", "TRITON_")  # how variables begin
OF_PROCESS = ("CUDA_VISIBLE_DEVICES",)  # Ray sets it
ANSWER_S = 30.0  # that Ray may take beside the wait for room


class RayRanks:
    """Call `place`, then `start`. Call `close` in any case."""

    addresses: Sequence[str] = ()  # of each rank's host, once they are placed

    def __init__(self, config: WorkerConfig, ray: RayConfig) -> None:
        self._config, self._ray = config, ray
        self._process, end = start_child(MODULE)
        self._pipe: FramePipe[Answer] = FramePipe(end, Answer)

    def place(self, environ: Mapping[str, str]) -> RanksPlaced:
        """Waits until Ray has a node for each rank. environ: what ranks need of it is handed on to them.

        Raises LoadError if there is no room in time, or ConfigError.
        """
        config = self._config
        sizes = config.tensor_parallel_size, config.pipeline_parallel_size
        cpus = max(config.threads, 1) if config.device == "cpu" else 0
        handed = {name: text for name, text in environ.items() if name.startswith(HANDED_ON) and name not in OF_PROCESS}
        handed["PYTHONPATH"] = os.pathsep.join(entry for entry in sys.path if entry)
        self._pipe.send(
            PlaceRanks(self._ray.address, *sizes, cpus, config.rank_timeout_s, handed, self._ray.with_nsight)
        )
        self._pipe.socket.settimeout(config.rank_timeout_s + ANSWER_S)
        try:
            answer = self._pipe.receive()
        except TimeoutError:
            raise LoadError(f"the Ray cluster at {self._ray.address} does not answer") from None
        self._pipe.socket.settimeout(None)
        if isinstance(answer, RanksPlaced):
            self.addresses = answer.addresses
            return answer
        if answer is not None and answer.table:
            for line in answer.table:
                log.error("%s", line)
            raise LoadError(
                f"{config.describe_ranks()}: Ray found no room for {config.num_ranks} ranks within "
                f"{config.rank_timeout_s:g} s (--rank-timeout): {answer.detail}"
            )
        raise _error(answer)

    def start(self, tickets: Sequence[RankTicket]) -> None:
        """Starts the ranks that follow the leader, in their order."""
        self._pipe.send(StartRanks([msgspec.msgpack.encode(ticket) for ticket in tickets]))

    def check(self) -> None:
        """Raises ConfigError or RankLostError if a rank cannot be started, or has ended before it joined."""
        if self._pipe.is_readable:
            raise _error(self._pipe.receive())

    def close(self) -> None:
        """Ends the ranks."""
        self._process.kill()
        self._process.wait()
        self._pipe.close()


def _error(answer: Answer | None) -> BlockyardError:
    if not isinstance(answer, RanksFailed):
        return LoadError("the process that talks to Ray has ended; its last lines say why")
    if answer.rank is None:
        return ConfigError(f"--distributed-executor-backend ray: {answer.detail}")
    return RankLostError(f"rank {answer.rank} has ended: {answer.detail}")


def place_ranks(config: WorkerConfig, ray: RayConfig, ending: ExitStack) -> RayRanks:
    """Waits until Ray has a node for each rank. Sets the GPU of this process, before torch sees one.

    ending: of this process, which ends the ranks. Raises ConfigError or LoadError.
    """
    ranks = RayRanks(config, ray)
    ending.callback(ranks.close)
    placed = ranks.place(os.environ)
    if placed.gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = placed.gpu
    return ranks


def wait_for_ray(
    config: WorkerConfig, ranks: RayRanks, team: LeaderTeam, is_stopped: Callable[[], bool], *, is_one_host: bool
) -> None:
    """Waits until the ranks that Ray starts have joined. is_one_host: so are all of them, and those of other replicas.

    is_stopped: the process is to end, and does so here. Raises ConfigError, LoadError or RankLostError.
    """
    own, *others = ranks.addresses
    bus, keys, folder = config.process.bus, None, str(team.folder)
    if not is_one_host or not bus.bind.startswith("ipc://"):
        keys = new_keys()  # they reach ranks through Ray
        address = LOOPBACK if is_one_host else own  # the name of this host may be unknown elsewhere
        bus = BusConfig(registry=bus.registry, bind=f"tcp://{address}", advertise=address)
    if not is_one_host:
        folder = str(Path(tempfile.gettempdir()) / f"ranks-of-ray-{secrets.token_hex(8)}" / "group")
        if config.device != "cpu":
            os.environ.update(network.environment(bus))
    digest, names = make_digest(config), {rank: f"rank {rank} on {one}" for rank, one in enumerate(others, 1)}
    entrance = RankEntrance(bus, config.process.name, names, digest, keys)
    try:
        pair = None if keys is None else (keys.public, keys.secret)
        ranks.start(
            [
                RankTicket(
                    *(rank, names[rank], config, digest, config.process.name, folder),
                    *(LOOPBACK if is_one_host else one, 0, entrance.address, pair),
                )
                for rank, one in enumerate(others, 1)
            ]
        )

        def turn() -> None:
            ranks.check()
            if is_stopped():
                raise SystemExit(0)

        joined = entrance.gather(config.rank_timeout_s, turn)
        meeting = Meeting(team.folder)
        if not is_one_host:
            listener, store = network.listen(own)
            meeting = Meeting(team.folder, own, store, listener.detach())
        team.join(entrance, joined, meeting)
    except BaseException:
        entrance.close()
        raise
