"""The process of a rank that follows a leader.

The process which starts it has opened two sockets. That is the leader on its own host, and a `rank_host` elsewhere,
whose rank joins the leader first. The rank ends with both.
"""

import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from setproctitle import setproctitle

from blockyard.services.gpu_worker import engine
from blockyard.services.gpu_worker.lora.ranks.follower_adapters import FollowerAdapters
from blockyard.services.gpu_worker.parallel.commands import (
    AdapterCommand,
    AdapterRead,
    Begin,
    Command,
    GroupComplete,
    RankFailed,
    RankSetup,
    Sign,
    TransferCommand,
)
from blockyard.services.gpu_worker.parallel.meeting import LOOPBACK, Meeting
from blockyard.services.gpu_worker.parallel.replicas import ReplicaRanks
from blockyard.services.gpu_worker.parallel.shares import Shard
from blockyard.services.gpu_worker.parallel.stages import place_of
from blockyard.services.gpu_worker.parallel.team import Connect, RankGroups
from blockyard.services.gpu_worker.ranks import network
from blockyard.services.gpu_worker.ranks.joining import RankTicket, join
from blockyard.services.gpu_worker.ranks.signs import RankSigns
from blockyard.services.gpu_worker.transfers.follower_transfers import FollowerTransfers
from blockyard.shared.bus.frame_links import FrameEnd
from blockyard.shared.config.services.worker import WorkerConfig
from blockyard.shared.errors import BlockyardError, RankLostError
from blockyard.shared.process import logs, settings
from blockyard.shared.process.frame_pipe import FramePipe

log = logging.getLogger(__name__)

LEADER = 0
REPLICAS = "replicas"  # a folder
HEARD_S = 5.0  # that others have to read why this rank fails, and to end it


@dataclass(frozen=True, slots=True)
class RankWatch:
    """Signs of life to and from the processes that this rank ends with."""

    leader: RankSigns
    starter: RankSigns | None = None  # the process that has started it; None: the leader has

    @property
    def is_serving(self) -> bool:
        return self.leader.is_serving

    def serve(self) -> None:
        """The start is over."""
        for one in (self.leader, self.starter):
            if one is not None:
                one.serve()


class FollowerTeam:
    """Implements `RankTeam`."""

    send = None

    def __init__(self, config: WorkerConfig, rank: int, meeting: Meeting) -> None:
        self.config, self._meeting = config, meeting
        self.place = place_of(rank, config.tensor_parallel_size, config.pipeline_parallel_size)
        self.stage_layers: list[int] = []  # as the leader has said; empty: there is one stage
        self.folder = meeting.folder
        self.replicas: ReplicaRanks | None = None  # None: this replica has all experts
        self._groups: RankGroups | None = None

    def begin(self, command: Begin) -> None:
        """Takes what the leader has decided."""
        self.stage_layers = command.stage_layers
        if command.replica_folder and self.replicas is None:
            meeting = Meeting(Path(command.replica_folder))
            if command.replica_store:
                apart, bus = self.config.replicas_apart, self.config.process.bus
                interface = network.interface_of(bus) if apart else self._meeting.interface
                meeting = Meeting(self.folder / REPLICAS, interface, command.replica_store)
                meeting.folder.mkdir(exist_ok=True)
            replica = Shard(self.config.replica, self.config.expert_replicas)
            self.replicas = ReplicaRanks(meeting, replica, self.place.rank)

    def meet_at(self, store: str) -> None:
        """store: host and port of torch's store, which the leader serves for ranks of several hosts."""
        self._meeting = replace(self._meeting, store=store)

    def divide(self, decide: Callable[[], list[int]]) -> list[int]:
        return self.stage_layers

    @property
    def followers(self) -> list[int]:
        return []

    def take_adapter_answers(self) -> list[tuple[int, AdapterRead]]:
        return []

    def connect(self, connect: Connect) -> RankGroups:
        if self._groups is None:
            self._groups = connect(self.place, self._meeting)
        return self._groups


def main(commands_fd: int, signs_fd: int) -> None:
    """Returns when the leader has closed its end. commands_fd, signs_fd: the two sockets."""
    sockets = [socket.socket(fileno=number) for number in (commands_fd, signs_fd)]
    for one in sockets:
        one.set_inheritable(False)
    signs: FramePipe[Sign] = FramePipe(sockets[1], Sign)
    first = FramePipe[RankSetup | RankTicket](sockets[0], RankSetup | RankTicket).receive()
    if isinstance(first, RankTicket):
        join_leader(first, signs)
    elif first is not None:
        follow_starter(first, FramePipe(sockets[0], Command), signs)


def follow_starter(setup: RankSetup, commands: FrameEnd[Command], signs: FrameEnd[Sign]) -> None:
    """The leader has started this process."""
    begin(setup.config, setup.rank, setup.leader_pid)

    def end(rank: int, what: str, failed: RankFailed | None) -> None:
        log.error("the leader %s", what)
        os.kill(setup.leader_pid, signal.SIGKILL)  # it may be stopped: its launcher starts another
        os._exit(RankLostError.exit_code)

    watch = RankWatch(RankSigns({LEADER: signs}, end))
    watch.leader.start()
    several_hosts = setup.config.num_nodes > 1
    interface = network.interface_of(setup.config.process.bus) if several_hosts else LOOPBACK
    follow(commands, FollowerTeam(setup.config, setup.rank, Meeting(Path(setup.folder), interface)), watch)


def join_leader(ticket: RankTicket, signs: FrameEnd[Sign] | None) -> None:
    """The leader is elsewhere. signs: to the process that has started this one; None: it only waits for the end."""
    begin(ticket.config, ticket.rank, ticket.starter_pid)

    def end(rank: int, what: str, failed: RankFailed | None) -> None:
        log.error("the process that has started this rank %s", what)
        os.kill(ticket.starter_pid, signal.SIGKILL)  # it may be stopped: its launcher starts another
        os._exit(RankLostError.exit_code)

    starter = None if signs is None else RankSigns({LEADER: signs}, end)

    def give_up(failed: RankFailed) -> None:
        if starter is None:
            log.error("%s", failed.detail)
        else:  # it ends this process, and says why
            starter.say(failed)
            time.sleep(HEARD_S)
        os._exit(failed.exit_code)

    def on_leader(rank: int, what: str, failed: RankFailed | None) -> None:
        give_up(failed or RankFailed(f"the leader {what}; all ranks end", RankLostError.exit_code))

    if starter is not None:
        starter.start()
    try:
        joined = join(ticket, ticket.config.rank_timeout_s)
    except BlockyardError as e:
        give_up(RankFailed(str(e), e.exit_code))
        return
    watch = RankWatch(RankSigns({LEADER: joined.signs}, on_leader), starter)
    watch.leader.start()
    meeting = Meeting(Path(ticket.folder), ticket.interface, joined.store)
    follow(joined.commands, FollowerTeam(ticket.config, ticket.rank, meeting), watch)


def begin(config: WorkerConfig, rank: int, parent_pid: int) -> None:
    settings.die_with(parent_pid)
    process = config.process
    setproctitle(f"blockyard: {process.name} rank {rank}")
    logs.setup(f"{process.name} rank {rank}", process.log_level, process.log_config_file)


def follow(commands: FrameEnd[Command], team: FollowerTeam, watch: RankWatch) -> None:
    """Does what comes until the leader closes its end, or tells others why it fails."""
    try:
        engine.open_device(team.config)
        do_commands(commands, team, watch)
    except RankLostError as e:  # the leader knows better why
        time.sleep(HEARD_S)
        fail(watch, str(e), e.exit_code)
    except BlockyardError as e:
        fail(watch, str(e), e.exit_code)
    except Exception as e:
        log.exception("rank %d ends", team.place.rank)
        detail = f"{type(e).__name__}: {e}".splitlines()[0]
        is_of_device = watch.is_serving and isinstance(e, RuntimeError)
        fail(watch, detail, RankLostError.exit_code, is_of_device=is_of_device)


def do_commands(commands: FrameEnd[Command], team: FollowerTeam, watch: RankWatch) -> None:
    """Loads at the first command, and does what comes until the leader closes its end."""
    follower, adapters = None, None
    transfers = FollowerTransfers(team.config, team.place.rank, commands)
    while True:
        transfers.wait_for_command(no_work if adapters is None else adapters.poll)
        command = commands.receive()
        if command is None:
            return
        if isinstance(command, GroupComplete):
            team.meet_at(command.store)
        elif isinstance(command, Begin):
            follower = adapters = None  # their memory first
            team.begin(command)
            follower = engine.follow(team.config, team, team.replicas)
            if follower.adapters is not None:
                adapters = FollowerAdapters(follower.adapters, commands.send)
            watch.serve()
        else:
            assert follower is not None
            if isinstance(command, TransferCommand):
                transfers.do(command, follower.kv_memory, follower.stored)
            elif isinstance(command, AdapterCommand):
                assert adapters is not None, f"{command} without adapters"
                adapters.do(command)
            else:
                follower.do(command)


def no_work() -> bool:
    return False


def fail(watch: RankWatch, detail: str, exit_code: int, *, is_of_device: bool = False) -> None:
    """Tells the leader and the process that has started this one: both end all ranks."""
    failed = RankFailed(detail, exit_code, is_of_device)
    for one in (watch.leader, watch.starter):
        if one is not None:
            one.say(failed)
    time.sleep(HEARD_S)
