"""A worker whose ranks are on several hosts (--nnodes): `wait_for_hosts` is the leader's part, `RankHost` another's.

The first ranks are on the host of the leader. Elsewhere the worker process starts its ranks and ends with them. Nobody
starts them again but its launcher: a group that has ended meets anew.
"""

import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from blockyard.services.gpu_worker.parallel.commands import RankFailed
from blockyard.services.gpu_worker.parallel.meeting import Meeting
from blockyard.services.gpu_worker.ranks import network
from blockyard.services.gpu_worker.ranks.entrance import RankEntrance
from blockyard.services.gpu_worker.ranks.group_digest import make_digest
from blockyard.services.gpu_worker.ranks.host_ranks import HostRanks
from blockyard.services.gpu_worker.ranks.joining import (
    ANSWER_S,
    TAKEN_S,
    RankTicket,
    leaders,
)
from blockyard.services.gpu_worker.ranks.leader_team import LeaderTeam
from blockyard.services.gpu_worker.ranks.signs import RankSigns
from blockyard.shared.bus.ring_query import ask_members
from blockyard.shared.config.services.worker import WorkerConfig
from blockyard.shared.errors import BlockyardError, ConfigError
from blockyard.shared.messages import RankAddress
from blockyard.shared.process.liveness import LivenessPipe

OTHERS_S = 1.0  # between two looks for another leader
TURN_S = 0.2


def wait_for_hosts(
    config: WorkerConfig, team: LeaderTeam, announce: Callable[[RankAddress], None], is_stopped: Callable[[], bool]
) -> None:
    """Waits until the ranks of all other hosts have joined. announce: puts the address on the membership list.

    is_stopped: the process is to end, and does so here. Raises ConfigError or LoadError.
    """
    each = len(config.host_ranks)
    places = {rank: f"--node-rank {rank // each}" for rank in range(each, config.num_ranks)}
    entrance = RankEntrance(config.process.bus, config.rank_group, places, make_digest(config))
    try:
        announce(entrance.address)
        others = OtherLeaders(config, entrance.address)

        def turn() -> None:
            others.check(time.monotonic())
            if is_stopped():
                raise SystemExit(0)

        joined = entrance.gather(config.rank_timeout_s, turn)
        interface = network.interface_of(config.process.bus)
        listener, store = network.listen(interface)
        team.join(entrance, joined, Meeting(team.folder, interface, store, listener.detach()))
    except BlockyardError as e:
        entrance.give_up(e)
        entrance.close()
        raise


class OtherLeaders:
    """Looks on the membership list for another leader of the same group."""

    def __init__(self, config: WorkerConfig, own: RankAddress, leader: str = "--node-rank 0") -> None:
        """leader: in words."""
        self._config, self._own, self._leader = config, own, leader
        self._next_s = 0.0
        self._since_s: float | None = (
            None  # there is one since then; a leader that has ended is listed for some seconds
        )

    def check(self, now: float) -> None:
        """Raises ConfigError if there is one."""
        if now < self._next_s:
            return
        self._next_s = now + OTHERS_S
        try:
            members = ask_members(self._config.process.bus, ANSWER_S).members
        except BlockyardError:
            return  # it is away: joining takes longer
        names = [name for name, address in leaders(members, self._own.group) if address != self._own]
        if not names:
            self._since_s = None
        elif self._since_s is None:
            self._since_s = now
        elif now - self._since_s > TAKEN_S:
            raise ConfigError(
                f"{self._leader}: {names[0]} leads the group {self._own.group} already; each group needs its own --name"
            )


class RankHost:
    """The ranks of a host that has no leader."""

    def __init__(self, config: WorkerConfig, folder: Path, on_end: Callable[[BlockyardError], None]) -> None:
        """folder: for files of this start. on_end: called in a thread when a rank is gone; must end this process."""
        self._config, self._on_end = config, on_end
        self._host = HostRanks(folder, config.num_ranks, {})
        self._watch: RankSigns | None = None

    def start(self, environment: Mapping[str, str], environments: Mapping[int, Mapping[str, str]]) -> None:
        """environment: of all ranks. environments: of each, by its number. Raises ConfigError."""
        config, digest = self._config, make_digest(self._config)
        interface = network.interface_of(config.process.bus)
        place = f"--node-rank {config.node_rank} ({socket.gethostname()})"
        for rank in config.host_ranks:
            ticket = RankTicket(
                *(rank, place, config, digest, config.rank_group, str(self._host.folder), interface, os.getpid())
            )
            self._host.start(rank, {**environment, **environments.get(rank, {})}, ticket)
        self._watch = RankSigns(self._host.signs, self._lost)
        self._watch.start()

    def run(self, stopped: threading.Event, liveness: LivenessPipe) -> None:
        """Waits for the end. The launcher is told once the ranks serve."""
        assert self._watch is not None
        while not stopped.wait(TURN_S):
            if self._watch.all_serve:
                liveness.turned()

    def close(self) -> None:
        if self._watch is not None:
            self._watch.stop()
        self._host.close()

    def _lost(self, rank: int, what: str, failed: RankFailed | None) -> None:
        error = self._host.error(rank, what, failed)
        self._host.kill()
        self._on_end(error)
