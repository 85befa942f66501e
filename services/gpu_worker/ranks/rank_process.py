"""`python -m blockyard.services.gpu_worker.ranks.rank_process COMMANDS SIGNS`: a rank that follows a leader.

The arguments are the numbers of two sockets that the leader has opened. The process ends with the leader.
"""

import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

from setproctitle import setproctitle

from blockyard.services.gpu_worker import engine
from blockyard.services.gpu_worker.lora.ranks.follower_adapters import FollowerAdapters
from blockyard.services.gpu_worker.parallel.commands import (
    AdapterCommand,
    AdapterRead,
    Begin,
    Command,
    RankFailed,
    RankSetup,
    Sign,
    TransferCommand,
)
from blockyard.services.gpu_worker.parallel.stages import place_of
from blockyard.services.gpu_worker.parallel.team import Connect, RankGroups
from blockyard.services.gpu_worker.ranks.signs import RankSigns
from blockyard.services.gpu_worker.transfers.follower_transfers import FollowerTransfers
from blockyard.shared.errors import BlockyardError, RankLostError
from blockyard.shared.process import logs, settings
from blockyard.shared.process.frame_pipe import FramePipe

log = logging.getLogger(__name__)

LEADER = 0
HEARD_S = 5.0  # that the leader has to read why this rank fails, and to end it


class FollowerTeam:
    """Implements `RankTeam`."""

    send = None

    def __init__(self, setup: RankSetup) -> None:
        config = setup.config
        self.place = place_of(setup.rank, config.tensor_parallel_size, config.pipeline_parallel_size)
        self.stage_layers: list[int] = []  # as the leader has said; empty: there is one stage
        self.folder = Path(setup.folder)
        self._groups: RankGroups | None = None

    def divide(self, decide: Callable[[], list[int]]) -> list[int]:
        """Implements `RankTeam`."""
        return self.stage_layers

    @property
    def followers(self) -> list[int]:
        """Implements `RankTeam`."""
        return []

    def take_adapter_answers(self) -> list[tuple[int, AdapterRead]]:
        """Implements `RankTeam`."""
        return []

    def connect(self, connect: Connect) -> RankGroups:
        """Implements `RankTeam`."""
        if self._groups is None:
            self._groups = connect(self.place, self.folder)
        return self._groups


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # of a terminal or a service manager: the leader ends first
        signal.signal(number, signal.SIG_IGN)
    sockets = [socket.socket(fileno=int(number)) for number in sys.argv[1:3]]
    for one in sockets:
        one.set_inheritable(False)
    commands: FramePipe[Command] = FramePipe(sockets[0], Command)
    signs: FramePipe[Sign] = FramePipe(sockets[1], Sign)
    setup = commands.receive()
    if not isinstance(setup, RankSetup):
        return
    settings.die_with(setup.leader_pid)
    process = setup.config.process
    setproctitle(f"blockyard: {process.name} rank {setup.rank}")
    logs.setup(f"{process.name} rank {setup.rank}", process.log_level, process.log_config_file)

    def end(rank: int, what: str, failed: RankFailed | None) -> None:
        log.error("the leader %s", what)
        os.kill(setup.leader_pid, signal.SIGKILL)  # it may be stopped: its launcher starts another
        os._exit(RankLostError.exit_code)

    watch = RankSigns({LEADER: signs}, end)
    watch.start()
    try:
        follow(commands, setup, watch)
    except RankLostError as e:  # the leader knows better why
        time.sleep(HEARD_S)
        fail(signs, str(e), e.exit_code)
    except BlockyardError as e:
        fail(signs, str(e), e.exit_code)
    except Exception as e:
        log.exception("rank %d ends", setup.rank)
        detail = f"{type(e).__name__}: {e}".splitlines()[0]
        fail(signs, detail, RankLostError.exit_code, is_of_device=watch.is_serving and isinstance(e, RuntimeError))


def follow(commands: FramePipe[Command], setup: RankSetup, watch: RankSigns) -> None:
    """Loads at the first command, and does what comes until the leader closes its end."""
    team, follower, adapters = FollowerTeam(setup), None, None
    transfers = FollowerTransfers(setup.config, setup.rank, commands)
    while True:
        transfers.wait_for_command(no_work if adapters is None else adapters.poll)
        command = commands.receive()
        if command is None:
            return
        if isinstance(command, Begin):
            follower = adapters = None  # their memory first
            team.stage_layers = command.stage_layers
            follower = engine.follow(setup.config, team)
            if follower.adapters is not None:
                adapters = FollowerAdapters(follower.adapters, commands.send)
            watch.serve()
        else:
            assert follower is not None
            if isinstance(command, TransferCommand):
                transfers.do(command, follower.kv_memory)
            elif isinstance(command, AdapterCommand):
                assert adapters is not None, f"{command} without adapters"
                adapters.do(command)
            else:
                follower.do(command)


def no_work() -> bool:
    return False


def fail(signs: FramePipe[Sign], detail: str, exit_code: int, *, is_of_device: bool = False) -> None:
    """Tells the leader, which ends all ranks."""
    with contextlib.suppress(OSError):  # the leader is gone
        signs.send(RankFailed(detail, exit_code, is_of_device))
    time.sleep(HEARD_S)


if __name__ == "__main__":
    main()
    settings.end(1)
