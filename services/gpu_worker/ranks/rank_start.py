"""`python -m blockyard.services.gpu_worker.ranks.rank_start PARENT COMMANDS SIGNS`: becomes a `rank_process`.

What is set here holds from its first moment, and importing torch takes it seconds: it ends with its parent, and signals
of a terminal do not end it. PARENT is the parent's process id; the other arguments are those of `rank_process`.
"""

import os
import signal
import sys

from blockyard.shared.process import settings

MODULE = "blockyard.services.gpu_worker.ranks.rank_process"


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # of a terminal or a service manager: the starter ends first
        signal.signal(number, signal.SIG_IGN)
    settings.die_with(int(sys.argv[1]))
    os.execv(sys.executable, [sys.executable, "-P", "-m", MODULE, *sys.argv[2:]])


if __name__ == "__main__":
    main()
