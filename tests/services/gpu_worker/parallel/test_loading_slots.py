"""No more ranks load at a time than the flag says."""

import multiprocessing
import threading
import time
from pathlib import Path

import pytest

from blockyard.services.gpu_worker.parallel.loading_slots import loading_slot


@pytest.mark.parametrize("most", [1, 2, None])
def test_so_many_load_at_a_time(tmp_path: Path, most: int | None) -> None:
    running, seen, lock = [0], list[int](), threading.Lock()

    def load() -> None:
        with loading_slot(tmp_path, most):
            with lock:
                running[0] += 1
                seen.append(running[0])
            time.sleep(0.1)
            with lock:
                running[0] -= 1

    threads = [threading.Thread(target=load) for _ in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert max(seen) == (most or 4)


def hold(folder: Path) -> None:
    with loading_slot(folder, 1):
        (folder / "held").touch()
        time.sleep(60)


def test_a_process_that_dies_holds_no_slot(tmp_path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=hold, args=(tmp_path,))
    process.start()
    while not (tmp_path / "held").exists():
        time.sleep(0.01)
    process.kill()
    with loading_slot(tmp_path, 1):
        process.join()


def test_a_rank_alone_makes_no_files(tmp_path: Path) -> None:
    with loading_slot(None, 1), loading_slot(tmp_path, None):
        assert not list(tmp_path.iterdir())
