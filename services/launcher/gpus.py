"""Whether there is a GPU for each replica, asked before anything is started. Without torch."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from blockyard.shared.config.worker import WorkerConfig
from blockyard.shared.errors import ConfigError

_DEVICE = re.compile(r"nvidia\d+")


def check(workers: Sequence[WorkerConfig], environ: Mapping[str, str], devices: Path = Path("/dev")) -> None:
    """Raises ConfigError, with the number of GPUs that there are, if they are too few."""
    needed = sum(config.gpu is not None for config in workers)
    if not needed:
        return
    num = count(environ, devices)
    if num < needed:
        raise ConfigError(
            f"--data-parallel-size {len(workers)}: each replica takes a GPU of its own, and there "
            f"{'is 1' if num == 1 else f'are {num}'} here"
        )


def count(environ: Mapping[str, str], devices: Path = Path("/dev")) -> int:
    """GPUs that a process started here would see."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return sum(bool(_DEVICE.fullmatch(entry.name)) for entry in devices.iterdir())
    words = [word.strip() for word in visible.split(",")]
    ends = [i for i, word in enumerate(words) if word in ("", "-1")]  # CUDA reads no further
    return ends[0] if ends else len(words)
