"""`python -m blockyard.services.gpu_worker.ranks.ray_group.placement_process SOCKET PID`: talks to Ray for a leader.

Ray ends the ranks, and takes back what they had, when this process ends. The kernel ends this process with the leader,
and a failure of Ray ends this process and not the leader's.
"""

import contextlib
import logging
import os
import signal
import socket
import sys

import ray
from ray.exceptions import RayError
from setproctitle import setproctitle

from blockyard.services.gpu_worker.ranks.ray_group.bundled_ranks import BundledRanks, in_a_line
from blockyard.services.gpu_worker.ranks.ray_group.frames import (
    PlaceRanks,
    RanksFailed,
    RanksPlaced,
    Request,
    StartRanks,
)
from blockyard.shared.process import settings
from blockyard.shared.process.frame_pipe import FramePipe

log = logging.getLogger(__name__)


def main() -> None:
    pipe: FramePipe[Request] = FramePipe(socket.socket(fileno=int(sys.argv[1])), Request)
    settings.die_with(int(sys.argv[2]))
    setproctitle("blockyard: placement of ranks by Ray")
    os.environ["RAY_SCHEDULER_EVENTS"] = "0"  # the table says more
    os.chdir("/")  # Ray has ranks import from the current folder, too
    asked = pipe.receive()
    assert isinstance(asked, PlaceRanks)
    failed: RanksFailed | None
    try:
        failed = run(asked, pipe)
    except RayError as e:
        failed = RanksFailed(in_a_line(e), [], None)
    except Exception as e:  # Ray has none of its own for a cluster that does not answer, or is of another version
        log.exception("no ranks by Ray")
        failed = RanksFailed(f"the cluster at {asked.address}: {in_a_line(e)}", [], None)
    if failed is not None:
        with contextlib.suppress(OSError):  # the leader is about to end
            pipe.send(failed)
    signal.pause()  # until the leader ends


def run(asked: PlaceRanks, pipe: FramePipe[Request]) -> RanksFailed | None:
    """Starts ranks and waits until one fails or all have ended. Raises RayError if one cannot be started."""
    ray.init(asked.address, log_to_driver=False, logging_level="error")
    ranks = BundledRanks(asked)
    if not ranks.place(asked.timeout_s):
        return ranks.no_room()
    pipe.send(RanksPlaced(ranks.addresses(), ranks.leader_gpu()))
    to_start = pipe.receive()
    assert isinstance(to_start, StartRanks)
    ranks.start(to_start.tickets)
    return ranks.wait_failure()


if __name__ == "__main__":
    main()
