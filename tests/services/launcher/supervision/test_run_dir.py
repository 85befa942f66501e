import os
import socket
import stat
import tempfile
from pathlib import Path

import pytest

from blockyard.services.launcher.supervision.run_dir import LOCK, PREFIX, MemberSockets, RunDir, remove_stale
from blockyard.shared.errors import ConfigError
from blockyard.shared.messages import Member, Role


def test_a_fresh_folder_is_private_and_goes_away() -> None:
    with RunDir(None) as run_dir:
        assert stat.S_IMODE(run_dir.path.stat().st_mode) == 0o700
        (run_dir.path / "scheduler.json").write_text("{}")
    assert not run_dir.path.exists()


def test_an_asked_folder_is_made_private_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "r"
    path.mkdir(mode=0o755)
    with RunDir(str(path)):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert path.exists()


def test_two_rings_do_not_share_a_folder(tmp_path: Path) -> None:
    with RunDir(str(tmp_path / "r")), pytest.raises(ConfigError, match="another ring uses it"):
        RunDir(str(tmp_path / "r"))
    with RunDir(str(tmp_path / "r")):
        pass


def test_a_path_too_long_for_sockets_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="longer than 90 bytes; choose one with --run-dir"):
        RunDir(str(tmp_path / ("x" * 90)))


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--run-dir .*file/r: Not a directory"):
        RunDir(str(tmp_path / "file/r"))


def test_folders_of_killed_launchers_are_removed_and_others_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(prefix="by-") as parent:
        monkeypatch.setattr(tempfile, "tempdir", parent)
        stale = Path(tempfile.mkdtemp(prefix=PREFIX))
        (stale / LOCK).touch()
        unknown = Path(tempfile.mkdtemp(prefix=PREFIX))  # no lock: another launcher is about to make it
        unlocked = Path(tempfile.mkdtemp(prefix=PREFIX))  # its launcher was killed before it made the lock
        os.utime(unlocked, (0, 0))
        with RunDir(None) as living:
            remove_stale(Path(parent))
            assert not stale.exists()
            assert not unlocked.exists()
            assert unknown.exists()
            assert living.path.exists()
            assert os.listdir(living.path) == [LOCK]


def test_leftovers_of_a_killed_ring_are_removed_from_an_asked_folder(tmp_path: Path) -> None:
    path = tmp_path / "r"
    path.mkdir()
    users = {"config.json", "notes.error", "users-socket"}
    for name in ("scheduler.json", "gpu_worker-1.json", "scheduler.error", "config.json", "notes.error"):
        (path / name).touch()
    with socket.socket(socket.AF_UNIX) as living:
        living.bind(str(path / "aaaaaaaaaaaa"))
        living.listen()
        for name in ("3016baa6916a", "message-bus", "users-socket"):
            with socket.socket(socket.AF_UNIX) as dead:
                dead.bind(str(path / name))
        with RunDir(str(path)):
            assert {*os.listdir(path)} == {LOCK, "aaaaaaaaaaaa"} | users


def test_a_folder_in_use_keeps_its_files(tmp_path: Path) -> None:
    with RunDir(str(tmp_path)):
        (tmp_path / "scheduler.json").touch()
        with pytest.raises(ConfigError):
            RunDir(str(tmp_path))
        assert (tmp_path / "scheduler.json").exists()


def test_the_socket_of_a_killed_member_is_removed_once_its_successor_is_there(tmp_path: Path) -> None:
    sockets = MemberSockets(tmp_path)
    names = ("one", "two", "other")
    for name in names:
        (tmp_path / name).touch()
    for name, endpoint in (("worker", "one"), ("scheduler", "other"), ("worker", "one"), ("worker", "two")):
        sockets.on_member(Member(name, Role.GPU_WORKER, 1, f"ipc://{tmp_path}/{endpoint}"))
    assert {*os.listdir(tmp_path)} == {"two", "other"}
