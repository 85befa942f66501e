import os
import stat
import tempfile
from pathlib import Path

import pytest

from blockyard.services.launcher.run_dir import LOCK, PREFIX, RunDir, remove_stale
from blockyard.shared.errors import ConfigError


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
    with RunDir(str(tmp_path / "r")), pytest.raises(ConfigError, match="another ring lives there"):
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


def test_what_killed_launchers_left_is_removed_and_the_living_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(prefix="by-") as parent:
        monkeypatch.setattr(tempfile, "tempdir", parent)
        stale = Path(tempfile.mkdtemp(prefix=PREFIX))
        (stale / LOCK).touch()
        unknown = Path(tempfile.mkdtemp(prefix=PREFIX))  # no lock: just being made by somebody
        with RunDir(None) as living:
            remove_stale(Path(parent))
            assert not stale.exists()
            assert unknown.exists()
            assert living.path.exists()
            assert os.listdir(living.path) == [LOCK]
