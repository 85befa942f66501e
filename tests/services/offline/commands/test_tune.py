"""`blockyard tune`, on a ring with a worker that compiles nothing."""

import subprocess
import sys
from pathlib import Path

import pytest

from blockyard.services.offline.commands import tune


def test_it_ends_when_the_workers_have_nothing_left_to_do(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "cache"
    command = [sys.executable, "-P", "-m", "blockyard", "tune", "--worker-cls", "mock", "--kernel-cache", str(folder)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1].endswith(f"{folder} has 0 files, 0.0 MiB")


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    command = [sys.executable, "-P", "-m", "blockyard", "tune", "demo", "--kernel-cache", str(tmp_path / "file" / "x")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 2
    assert run.stderr == f"blockyard tune: error: --kernel-cache {tmp_path}/file/x: Not a directory\n"


def test_progress_is_printed_at_each_tenth() -> None:
    fractions = iter([0.0, 0.01, 0.19, 0.2, 0.3, 0.39, 0.4, 0.99, 1.0])
    said: list[float] = []
    tune.wait(lambda: next(fractions), said.append, period_s=0.0)
    assert said == [0.0, 0.19, 0.2, 0.3, 0.4, 0.99]


def test_a_ring_that_ends_is_an_error() -> None:
    def lost() -> float:
        raise ConnectionError

    with pytest.raises(ConnectionError):
        tune.wait(lost, print, period_s=0.0)
