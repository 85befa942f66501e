"""A leader that starts with its follower, prints the follower's process id, and waits.

python -m waiting_leader SETTINGS-FILE FOLDER
"""

import sys
import threading
from pathlib import Path

from blockyard.services.gpu_worker import engine
from blockyard.services.gpu_worker.ranks.leader_team import LeaderTeam
from blockyard.shared.config.services.worker import WorkerConfig
from blockyard.shared.process.settings import read

if __name__ == "__main__":
    config, lost = read(Path(sys.argv[1]), WorkerConfig), threading.Event()
    team = LeaderTeam(config, Path(sys.argv[2]), lambda error: lost.set())
    team.start({})
    engine.start(config, lambda phase, progress, notes: None, team=team)
    team.serve()
    print(team.stats()[1].pid, flush=True)
    lost.wait()
