"""Processes of ranks that are killed, or lose their parent, before they have imported torch."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

IMPORT_S = 60.0
MOST_S = 20.0  # until the rank begins to import torch
ENDS_S = 2.0
PARENT = """
import sys, time
from pathlib import Path
from blockyard.services.gpu_worker.parallel.commands import RankFailed
from blockyard.services.gpu_worker.ranks.host_ranks import HostRanks
ranks = HostRanks(Path(sys.argv[1]), 2, {})
ranks.start(1, {"PYTHONPATH": sys.argv[2]}, RankFailed("a frame", 1))
print(ranks.processes[1].pid, flush=True)
time.sleep(60)
"""


@pytest.fixture
def slow_torch(tmp_path: Path) -> str:
    """A path of modules on which torch is not imported before the test is over."""
    (tmp_path / "torch.py").write_text(
        f"import time\nfrom pathlib import Path\nPath({str(tmp_path / 'imports')!r}).touch()\ntime.sleep({IMPORT_S})\n"
    )
    return os.pathsep.join([str(tmp_path), *filter(None, sys.path)])


def test_a_rank_that_imports_torch_ends_with_its_parent(tmp_path: Path, slow_torch: str) -> None:
    parent = subprocess.Popen([sys.executable, "-P", "-c", PARENT, tmp_path, slow_torch], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    with parent.stdout as lines:
        rank = int(lines.readline())
    wait_until((tmp_path / "imports").exists, MOST_S)
    os.kill(rank, signal.SIGTERM)  # it ends with its parent, and not before
    time.sleep(0.2)
    assert Path(f"/proc/{rank}").exists()
    parent.kill()
    parent.wait()
    wait_until(lambda: not is_running(rank), ENDS_S)


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def wait_until(holds: Callable[[], bool], most_s: float) -> None:
    ends_s = time.monotonic() + most_s
    while not holds():
        assert time.monotonic() < ends_s
        time.sleep(0.02)
