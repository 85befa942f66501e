"""Users without a home folder."""

import os
import pwd
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from blockyard.shared.process.home import home_variables

UID = os.getuid()
SRC = Path(__file__).parents[3] / ".src"


def unknown(_: int) -> pwd.struct_passwd:
    raise KeyError


def test_a_user_with_a_home_folder_keeps_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert home_variables({}) == {}  # the user database has it
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert home_variables({"HOME": str(tmp_path)}, tmp_path) == {} and not list(tmp_path.iterdir())


def test_a_user_of_no_entry_gets_a_folder_that_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    found = home_variables({}, tmp_path)
    assert found == {"HOME": str(tmp_path / f"blockyard-home-{UID}"), "LOGNAME": str(UID)}
    assert Path(found["HOME"]).stat().st_mode & 0o777 == 0o700
    assert home_variables({"USER": "me"}, tmp_path) == {"HOME": found["HOME"]}
    monkeypatch.setattr(os, "access", lambda *_: False)  # as for the root folder of a container
    assert home_variables({"HOME": "/"}, tmp_path) == found


@pytest.mark.parametrize("kind", ["open to all", "link"])
def test_a_folder_that_others_may_write_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str) -> None:
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    planted, elsewhere = tmp_path / f"blockyard-home-{UID}", tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    if kind == "link":
        planted.symlink_to(elsewhere)
    else:
        planted.mkdir()
        planted.chmod(0o777)
    other = Path(home_variables({}, tmp_path)["HOME"])
    assert other.parent == tmp_path and other not in (planted, elsewhere) and other.stat().st_mode & 0o777 == 0o700


def _can_map_users() -> bool:
    try:
        return (
            subprocess.run(["unshare", "-U", "--map-user=54321", "true"], check=False, capture_output=True).returncode
            == 0
        )
    except OSError:
        return False


@pytest.fixture
def short_path() -> Iterator[Path]:
    """pytest's own folders may be too long for sockets."""
    with tempfile.TemporaryDirectory(prefix="home-") as folder:
        yield Path(folder)


@pytest.mark.skipif(not _can_map_users(), reason="needs user namespaces")
def test_a_worker_starts_without_home_and_passwd_entry(short_path: Path) -> None:
    script = """
from blockyard import LLM, SamplingParams
with LLM("demo", dtype="float32", log_level="warning") as llm:
    print(len(llm.generate("a", SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)[0].outputs[0].token_ids))
"""
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"}
    (short_path / "script.py").write_text(script)
    words = [
        "unshare",
        "-U",
        "--map-user=54321",
        "--map-group=54321",
        sys.executable,
        "-P",
        str(short_path / "script.py"),
    ]
    ran = subprocess.run(
        words,
        env=env | {"TMPDIR": str(short_path)},
        cwd=short_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (ran.returncode, ran.stdout) == (0, "3\n"), ran.stderr
    assert not (short_path / "~").exists() and (short_path / "blockyard-home-54321").is_dir()
