"""`python -m blockyard.services.gpu_worker.ranks.rank_start PARENT COMMANDS SIGNS`: runs a `rank_process`.

What is set here holds while torch is imported, which takes seconds: the process ends with its parent, and signals of a
terminal do not end it. PARENT is the parent's process id; the other arguments are those of `rank_process.main`.
"""

import signal
import sys

from blockyard.shared.process import settings


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # of a terminal or a service manager: the starter ends first
        signal.signal(number, signal.SIG_IGN)
    settings.die_with(int(sys.argv[1]))
    with settings.loading_modules():
        from blockyard.services.gpu_worker.ranks import rank_process  # noqa: PLC0415
    rank_process.main(*map(int, sys.argv[2:]))
    settings.end(1)


if __name__ == "__main__":
    main()
