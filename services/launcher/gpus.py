"""Checks without torch that there is a GPU for each replica, before any process is started."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from blockyard.shared.config.services.worker import WorkerConfig
from blockyard.shared.errors import ConfigError

_DEVICE = re.compile(r"nvidia\d+")


def check(workers: Sequence[WorkerConfig], environ: Mapping[str, str], devices: Path = Path("/dev")) -> None:
    """Raises ConfigError if there are fewer GPUs than ranks of all replicas that need one."""
    needed = sum(config.num_ranks for config in workers if config.gpu is not None)
    if not needed:
        return
    num = count(environ, devices)
    if num < needed and needed > len(workers):
        most = max(workers, key=lambda one: one.num_ranks)
        raise ConfigError(
            f"{most.describe_ranks()}: the ranks of all workers need {needed} GPUs, and there "
            f"{'is 1' if num == 1 else f'are {num}'} here"
        )
    if num < needed:
        raise ConfigError(
            f"--data-parallel-size, --prefill-workers, --decode-workers: each of {len(workers)} workers needs its own "
            f"GPU, and there {'is 1' if num == 1 else f'are {num}'} here"
        )


def count(environ: Mapping[str, str], devices: Path = Path("/dev")) -> int:
    """Returns the number of GPUs that child processes will see."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return sum(bool(_DEVICE.fullmatch(entry.name)) for entry in devices.iterdir())
    words = [word.strip() for word in visible.split(",")]
    ends = [i for i, word in enumerate(words) if word in ("", "-1")]  # CUDA ignores what follows
    return ends[0] if ends else len(words)
