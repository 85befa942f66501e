"""A home folder for users that have none, as in containers with a user id of no passwd entry.

Triton, torch and huggingface_hub keep caches in the home folder, and fail or write to a folder `~` without one.
"""

import os
import pwd
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path


def home_variables(environ: Mapping[str, str] = os.environ, temporary: Path | None = None) -> dict[str, str]:
    """Returns HOME and LOGNAME of a folder for caches; nothing if the user has a home folder.

    The folder is in `temporary` (None: the system's) and stays there, so that later starts find the caches.
    """
    uid = os.getuid()
    try:
        known = pwd.getpwuid(uid)
    except KeyError:
        known = None
    home = environ.get("HOME") or (known.pw_dir if known is not None else "")
    # "/" is what container runtimes set for a user id that they do not know
    if home and (home != "/" or os.access(home, os.W_OK)):
        return {}
    found = {"HOME": str(_own_folder(temporary or Path(tempfile.gettempdir()), uid))}
    if known is None and not any(environ.get(name) for name in ("LOGNAME", "USER")):
        found["LOGNAME"] = str(uid)  # torch asks for a user name
    return found


def _own_folder(temporary: Path, uid: int) -> Path:
    """A folder of this user's. One that another user made is left alone: it may hold planted kernels."""
    folder = temporary / f"blockyard-home-{uid}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if stat.S_ISDIR(status.st_mode) and status.st_uid == uid and not status.st_mode & 0o077:
        return folder
    return Path(tempfile.mkdtemp(prefix=f"blockyard-home-{uid}-", dir=temporary))
