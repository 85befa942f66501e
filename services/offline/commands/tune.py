"""`blockyard tune MODEL`: compiles a model's GPU kernels and tunes its layers ahead of later starts.

With `--kernel-cache DIR` the results go to that folder, for example in a container image. Pass the same other
flags as to `blockyard serve`: kernels depend on them.
"""

import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from blockyard.services.launcher.serve import make_display, read_values
from blockyard.services.offline.session import Session
from blockyard.shared.config.parsed_flags import Values
from blockyard.shared.errors import ConfigError

PERIOD_S = 0.2


def main(args: Sequence[str]) -> int:
    """Returns when the workers have finished their idle work. Raises BlockyardError."""
    values, notes = read_values(args)
    folder = values.maybe("kernel-cache", str)
    if folder is not None:
        _make(Path(folder))
    for note in notes:
        print(note, flush=True)
    session = Session(values, lambda deployment: make_display(deployment, sys.stdout))
    began_s = time.monotonic()
    try:
        session.start()
        wait(session.idle_work_done, _say)
    finally:
        session.close()
    print(f"done after {time.monotonic() - began_s:.1f} s; {describe(values)}", flush=True)
    return 0


def wait(done: Callable[[], float], say: Callable[[float], None], period_s: float = PERIOD_S) -> None:
    """Waits until `done` is 1.0 and reports each tenth."""
    said = -1
    while (fraction := done()) < 1.0:
        if int(10 * fraction) > said:
            said = int(10 * fraction)
            say(fraction)
        time.sleep(period_s)


def describe(values: Values) -> str:
    folder = values.maybe("kernel-cache", str)
    if folder is None:
        return "kernels and tuned configs are in the user's cache (--kernel-cache DIR writes them to one folder)"
    sizes = [(Path(root) / name).stat().st_size for root, _, names in os.walk(folder) for name in names]
    return f"{folder} has {len(sizes)} files, {sum(sizes) / 2**20:.1f} MiB"


def _say(fraction: float) -> None:
    print(f"compiled and measured: {fraction:.0%}", flush=True)


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise ConfigError(f"--kernel-cache {folder}: {e.strerror}") from e
