"""Has this machine's C++ compiler make a library of a source in cpp/, in a process of its own, once for a machine."""

import ctypes
import hashlib
import os
import platform
import shutil
import stat
import subprocess
from collections.abc import Mapping
from pathlib import Path

FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-shared", "-fopenmp", "-Wno-psabi")
COMPILERS = ("c++", "g++", "clang++")
NICE = ("nice", "-n", "19")  # whoever is served meanwhile comes first
# whole or not at all, and also when who asked for it has ended: out, made, compiler and its arguments
SCRIPT = 'out=$1; made=$2; shift 2; "$@" -o "$made" && mv "$made" "$out"'


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Of libraries alone: it must be nobody else's."""
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "blockyard" / "compiled"


def find_compiler(environ: Mapping[str, str] = os.environ) -> str | None:
    """$CXX, or what goes by a usual name."""
    names = (environ["CXX"],) if environ.get("CXX") else COMPILERS
    return next((path for name in names if (path := shutil.which(name, path=environ.get("PATH"))) is not None), None)


class Library:
    """Of one source and the headers beside it. Call `start`, then `poll` until it says that it is done."""

    def __init__(self, source: Path, folder: Path, compiler: str) -> None:
        self._source, self._compiler = source, compiler
        name = f"{source.stem}-{_digest(source, compiler)}.so"
        self.path = folder / name
        self._process: subprocess.Popen[bytes] | None = None
        self.problem = ""  # why there will be none

    def start(self) -> None:
        """Begins to compile, if that was not done before."""
        if self.path.is_file():
            return
        nice = NICE if shutil.which(NICE[0]) else ()
        made = f"{self.path}.{os.getpid()}"
        command = (*nice, "sh", "-c", SCRIPT, "sh", str(self.path), made, self._compiler, *FLAGS, str(self._source))
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
            )
        except OSError as e:
            self.problem = str(e)

    def poll(self) -> ctypes.CDLL | None:
        """The library once it is there. Never waits."""
        if self.problem or (self._process is not None and self._process.poll() is None):
            return None
        return self._finish()

    def wait(self) -> ctypes.CDLL | None:
        if self._process is not None:
            self._process.wait()
        return self.poll()

    def _finish(self) -> ctypes.CDLL | None:
        try:
            if self._process is not None:
                _, said = self._process.communicate()
                code, self._process = self._process.returncode, None
                if code:
                    errors = [line for line in said.decode(errors="replace").splitlines() if "error" in line]
                    self.problem = f"{self._compiler} failed ({code}): {errors[0] if errors else ''}"
                    return None
            if _writable_by_others(self.path.parent):
                self.problem = f"others can write to {self.path.parent}"
                return None
            return ctypes.CDLL(str(self.path))
        except OSError as e:
            self.problem = str(e)
            return None


def _writable_by_others(folder: Path) -> bool:
    """Then what is there may be anybody's."""
    found = folder.stat()
    return found.st_uid not in (os.geteuid(), 0) or bool(found.st_mode & (stat.S_IWGRP | stat.S_IWOTH))


def _digest(source: Path, compiler: str) -> str:
    """Of all that the library depends on: a folder may be shared by machines."""
    found = os.stat(compiler)
    parts = [*FLAGS, os.path.realpath(compiler), str(found.st_size), str(found.st_mtime_ns), platform.machine(), _cpu()]
    digest = hashlib.sha256("\0".join(parts).encode())
    for path in (source, *sorted(source.parent.glob("*.h"))):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _cpu(info: Path = Path("/proc/cpuinfo")) -> str:
    """What -march=native looks at."""
    try:
        lines = info.read_text("utf-8", "replace").splitlines()
    except OSError:
        return platform.processor()
    wanted = ("vendor_id", "cpu family", "model", "stepping", "flags", "features", "cpu part")
    return "\n".join(dict.fromkeys(line for line in lines if line.split(":")[0].strip().lower() in wanted))
