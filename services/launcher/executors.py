"""Chooses who starts the ranks of workers: their first process, or Ray. Counts GPUs, before a process is started."""

import contextlib
import re
import socket
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import msgspec

from blockyard.shared.config.parsed_flags import Values
from blockyard.shared.config.services.worker import RayConfig, WorkerConfig
from blockyard.shared.config.worker_fields import executor, on_gpu
from blockyard.shared.errors import ConfigError

RAY = "ray"
_DEVICE = re.compile(r"nvidia\d+")
ANSWER_S = 2.0  # that the cluster's first process may take to accept a connection
ADDRESS_FILE = "ray/ray_current_cluster"  # written by `ray start`


def choose(
    workers: Sequence[WorkerConfig], values: Values, environ: Mapping[str, str], devices: Path = Path("/dev")
) -> list[WorkerConfig]:
    """Returns the settings with the Ray cluster that starts the ranks, if one does.

    Unless a flag says who, Ray does if this machine has too few GPUs, but one for the first rank of each worker.
    Raises ConfigError: there are too few GPUs, or no cluster.
    """
    asked = executor(values)
    if asked == RAY:
        try:
            return _on_ray(workers, values, find_cluster(environ))
        except ConfigError as e:
            raise ConfigError(f"--distributed-executor-backend ray: {e}") from None
    try:
        check_gpus(workers, environ, devices)
    except ConfigError as e:
        has_ranks = all(config.num_ranks > 1 for config in workers)
        if asked is not None or not has_ranks or count_gpus(environ, devices) < len(workers):
            raise
        try:
            return _on_ray(workers, values, find_cluster(environ))
        except ConfigError as of_ray:
            raise ConfigError(f"{e}; Ray starts ranks on GPUs of other machines: {of_ray}") from None
    if values["ray-workers-use-nsight"]:
        where = values.where("ray-workers-use-nsight")
        raise ConfigError(f"{where}: Ray starts no rank here; give --distributed-executor-backend ray")
    return list(workers)


def _on_ray(workers: Sequence[WorkerConfig], values: Values, address: str) -> list[WorkerConfig]:
    """Raises ConfigError for ranks of several hosts. A worker of one rank is a process of this machine."""
    if any(config.replicas_apart for config in workers):
        raise ConfigError(f"{values.where('data-parallel-rank')}: the ranks of a replica are on its host; use `serve`")
    if any(config.num_nodes > 1 for config in workers):
        raise ConfigError(f"{values.where('nnodes')}: Ray finds the hosts of ranks itself")
    ray = RayConfig(address=address, with_nsight=values.get("ray-workers-use-nsight", bool))
    return [_placed(one, ray, on_gpu(values)) if one.num_ranks > 1 else one for one in workers]


def _placed(config: WorkerConfig, ray: RayConfig, on_gpu: bool) -> WorkerConfig:
    """A rank without a GPU has a CPU of the cluster for each of its threads."""
    if on_gpu:
        return msgspec.structs.replace(config, ray=ray, gpu=None)
    return msgspec.structs.replace(config, ray=ray, device="cpu", threads=config.threads or 1)


def find_cluster(environ: Mapping[str, str]) -> str:
    """Returns host and port of the cluster that Ray's own commands would use. Raises ConfigError if none answers."""
    if find_spec(RAY) is None:
        raise ConfigError("Ray is not installed: pip install 'blockyard[ray]'")
    address = environ.get("RAY_ADDRESS") or "auto"
    where = f"RAY_ADDRESS {address}"
    if address == "auto":
        file = Path(environ.get("RAY_TMPDIR") or environ.get("TMPDIR") or "/tmp") / ADDRESS_FILE
        address = ""
        with contextlib.suppress(OSError):
            address = file.read_text("utf-8").strip()
        where = f"{address}, as {file} says"
        if not address:
            raise ConfigError("there is no Ray cluster: start one with `ray start --head`, or set RAY_ADDRESS")
    host, _, port = address.rpartition(":")
    if not host or "://" in address or not port.isdigit():
        raise ConfigError(f"{where}: host:port of a cluster is needed, without ray://")
    try:
        socket.create_connection((host.strip("[]"), int(port)), ANSWER_S).close()
    except (OSError, OverflowError) as e:
        raise ConfigError(f"no Ray cluster answers at {where}: {e}") from e
    return address


def check_gpus(workers: Sequence[WorkerConfig], environ: Mapping[str, str], devices: Path = Path("/dev")) -> None:
    """Raises ConfigError if there are fewer GPUs than ranks of all replicas that need one."""
    needed = sum(len(config.host_ranks) for config in workers if config.gpu is not None)
    if not needed:
        return
    num = count_gpus(environ, devices)
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


def count_gpus(environ: Mapping[str, str], devices: Path = Path("/dev")) -> int:
    """Returns the number of GPUs that child processes will see. Ranks may share one that is named twice."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return sum(bool(_DEVICE.fullmatch(entry.name)) for entry in devices.iterdir())
    words = [word.strip() for word in visible.split(",")]
    ends = [i for i, word in enumerate(words) if word in ("", "-1")]  # CUDA ignores what follows
    return ends[0] if ends else len(words)
