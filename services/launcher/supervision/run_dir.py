"""The private folder of a ring with its ipc sockets and settings files, readable by its owner only."""

import contextlib
import errno
import fcntl
import os
import shutil
import socket
import stat
import tempfile
import time
from pathlib import Path
from types import TracebackType

from blockyard.shared.errors import ConfigError
from blockyard.shared.messages import Member

PREFIX = "blockyard-"
LOCK = "lock"  # locked while the ring runs; the kernel unlocks it however the launcher ends
SERVICES = ("message_bus", "api_gateway", "tokenizer_pool", "scheduler", "detokenizer", "gpu_worker")
YOUNG_S = 60.0  # a younger folder without a lock file may belong to a launcher that is just starting
MAX_PATH_BYTES = 90  # an ipc path has at most 107 bytes, and socket names have up to 13


class RunDir:
    """A context that removes its folder `path` at exit if it created it. Raises ConfigError."""

    def __init__(self, folder: str | None) -> None:
        remove_stale(Path(tempfile.gettempdir()))
        self._made = folder is None
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX)) if folder is None else _private(Path(folder).absolute())
        if len(os.fsencode(self.path)) > MAX_PATH_BYTES:
            self._remove()
            raise ConfigError(f"run folder {self.path}: longer than {MAX_PATH_BYTES} bytes; choose one with --run-dir")
        self._lock = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if not _try_lock(self._lock):
            os.close(self._lock)
            raise ConfigError(f"run folder {self.path}: another ring uses it")
        remove_leftovers(self.path)

    def __enter__(self) -> "RunDir":
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, trace: TracebackType | None) -> None:
        self._remove()
        os.close(self._lock)

    def _remove(self) -> None:
        if self._made:
            shutil.rmtree(self.path, ignore_errors=True)


def remove_stale(parent: Path) -> None:
    """Removes the folders of this user's launchers that were killed before they could remove them."""
    for folder in parent.glob(f"{PREFIX}*"):
        try:
            if folder.lstat().st_uid != os.getuid() or not stat.S_ISDIR(folder.lstat().st_mode):
                continue
            if not (folder / LOCK).exists() and time.time() - folder.lstat().st_mtime > YOUNG_S:
                shutil.rmtree(folder, ignore_errors=True)
                continue
            lock = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue  # another user's, or just being created
        if _try_lock(lock):
            shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def remove_leftovers(folder: Path) -> None:
    """Removes settings, error files and dead sockets that a killed ring left in a folder of --run-dir.

    Other files belong to the user and stay.
    """
    for path in folder.iterdir():
        with contextlib.suppress(OSError):
            ours = path.name.startswith(SERVICES) and path.suffix in (".json", ".error")
            if ours or (_is_members(path.name) and _is_dead(path)):
                path.unlink()


def _is_members(name: str) -> bool:
    """Whether a socket's name is the registry's or a random one of a member."""
    return name == "message-bus" or (len(name) == 12 and not name.strip("0123456789abcdef"))


def _is_dead(path: Path) -> bool:
    """Whether no process listens on a socket."""
    if not stat.S_ISSOCK(path.lstat().st_mode):
        return False
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == errno.ECONNREFUSED


class MemberSockets:
    """Removes the socket of a killed member when its restarted process joins with another one."""

    def __init__(self, folder: Path) -> None:
        self._prefix = f"ipc://{folder}/"
        self._endpoints: dict[str, str] = {}

    def on_member(self, member: Member) -> None:
        before = self._endpoints.get(member.name, member.endpoint)
        self._endpoints[member.name] = member.endpoint
        if before != member.endpoint and before.startswith(self._prefix):
            Path(before.removeprefix("ipc://")).unlink(missing_ok=True)


def _private(path: Path) -> Path:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.stat().st_uid != os.getuid():
            raise ConfigError(f"--run-dir {path}: belongs to another user")
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
