"""The private folder of a ring: its ipc sockets and its settings files. Only its owner may look into it."""

import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path
from types import TracebackType

from blockyard.shared.errors import ConfigError

PREFIX = "blockyard-"
LOCK = "lock"  # held while the ring lives; the kernel lets go of it however the launcher ends
MOST_CHARS = 90  # an ipc path has 107 bytes, and socket names have up to 13


class RunDir:
    """A context: `path` is removed at the end if it was made here. Raises ConfigError if it cannot be had."""

    def __init__(self, asked: str | None) -> None:
        remove_stale(Path(tempfile.gettempdir()))
        self._made = asked is None
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX)) if asked is None else _private(Path(asked).absolute())
        if len(os.fsencode(self.path)) > MOST_CHARS:
            self._remove()
            raise ConfigError(f"run folder {self.path}: longer than {MOST_CHARS} bytes; choose one with --run-dir")
        self._lock = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if not _try_lock(self._lock):
            os.close(self._lock)
            raise ConfigError(f"run folder {self.path}: another ring lives there")

    def __enter__(self) -> "RunDir":
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, trace: TracebackType | None) -> None:
        self._remove()
        os.close(self._lock)

    def _remove(self) -> None:
        if self._made:
            shutil.rmtree(self.path, ignore_errors=True)


def remove_stale(parent: Path) -> None:
    """Removes what launchers of this user left behind that were killed before they could tidy up."""
    for folder in parent.glob(f"{PREFIX}*"):
        try:
            if folder.lstat().st_uid != os.getuid() or not stat.S_ISDIR(folder.lstat().st_mode):
                continue
            lock = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue  # somebody else's, or about to be filled
        if _try_lock(lock):
            shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _private(path: Path) -> Path:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.stat().st_uid != os.getuid():
            raise ConfigError(f"--run-dir {path}: belongs to somebody else")
        path.chmod(0o700)
    except OSError as e:
        raise ConfigError(f"--run-dir {path}: {e.strerror}") from e
    return path


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
