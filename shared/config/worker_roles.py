"""The workers that `serve` starts: how many of each role, the flags of each role, and which share their experts."""

from dataclasses import dataclass
from typing import Any

from blockyard.shared.architectures import find_architecture
from blockyard.shared.config import kv_transfer
from blockyard.shared.config.checkpoint import Checkpoint, num_experts
from blockyard.shared.config.flags.roles import PER_ROLE, ROLE_NAMES
from blockyard.shared.config.parsed_flags import Values
from blockyard.shared.config.services.process import BusConfig
from blockyard.shared.errors import ConfigError
from blockyard.shared.messages import KVRole

EXPERTS, REPLICAS, NUMBER = "enable-expert-parallel", "data-parallel-size", "data-parallel-rank"


@dataclass(frozen=True, slots=True)
class WorkersOfRole:
    """Workers of one machine with the same settings. Each is a worker group of its own."""

    role: KVRole | None  # None: no flag gives one, and the workers have no KV transfers
    num_workers: int
    values: Values  # with the role's own flags
    size: int = 1  # so many of them, one after another, may have the experts of a mixture together

    @property
    def name(self) -> str:
        """The first word of a worker's number in its name: "gpu_worker prefill 0", "gpu_worker 0"."""
        return "gpu_worker" if self.role in (None, KVRole.BOTH) else f"gpu_worker {self.role}"


def workers_to_start(values: Values) -> list[WorkersOfRole]:
    """Returns the workers of --prefill-workers, --decode-workers and --data-parallel-size. Raises ConfigError.

    With one of the first two, --data-parallel-size adds workers of both roles if it is given. Without them all its
    workers have the role of --kv-transfer-config. --prefill.data-parallel-size multiplies --prefill-workers.
    """
    role, numbers = kv_transfer.role_of(values), {name: values.get(f"{name}-workers", int) for name in ROLE_NAMES}
    for name, number in numbers.items():
        own = [flag for flag in (*PER_ROLE, REPLICAS) if values.is_given(f"{name}.{flag}")]
        if own and not number:
            raise ConfigError(f"{values.where(f'{name}.{own[0]}')}: there are no {name} workers; give --{name}-workers")
    if not any(numbers.values()):
        size = values.get(REPLICAS, int)
        return [WorkersOfRole(role, size, _of_role(values, role), size)]
    if role not in (None, KVRole.BOTH):
        raise ConfigError(
            f"{values.where(kv_transfer.FLAG)}: kv_role {kv_transfer.keys_of(values).kv_role}: --prefill-workers and "
            "--decode-workers give the roles; use kv_both"
        )
    num_both = values.get(REPLICAS, int) if values.is_given(REPLICAS) else 0
    found = [WorkersOfRole(KVRole.BOTH, num_both, values, num_both)]
    for name, number in numbers.items():
        size = values.get(f"{name}.{REPLICAS}", int)
        found.append(WorkersOfRole(KVRole(name), number * size, values.of_role(name), size))
    return [workers for workers in found if workers.num_workers]


def of_process(values: Values) -> WorkersOfRole:
    """Returns the one worker of `blockyard run gpu-worker`. Raises ConfigError."""
    role = kv_transfer.role_of(values)
    return WorkersOfRole(role, 1, _of_role(values, role))


def of_replica(values: Values, model: Checkpoint, bus: BusConfig) -> dict[str, Any]:
    """Returns WorkerConfig's fields for a replica that is a process of `blockyard run`. Raises ConfigError."""
    if (number := values.maybe(NUMBER, int)) is None:
        return {}
    where, size = values.where(NUMBER), values.get(REPLICAS, int)
    if number >= size:
        raise ConfigError(f"{where} {number}: replicas of {values.where(REPLICAS)} {size} have numbers below {size}")
    if not values.get(EXPERTS, bool):
        raise ConfigError(f"{where}: is for replicas with --{EXPERTS}; the scheduler knows others by themselves")
    if values.get("nnodes", int) > 1:
        raise ConfigError(f"{where}: not built with {values.where('nnodes')}: the ranks of a replica are on one host")
    if bus.bind.startswith("tcp://0.0.0.0"):
        raise ConfigError(f"{where}: --bind tcp://ADDRESS is needed, the network interface for links between replicas")
    together = num_expert_replicas(WorkersOfRole(None, size, values, size), model)
    if together == 1:
        return {}
    group = values.maybe("name", str) or "gpu_worker"
    return {"expert_replicas": together, "replica": number, "replicas_apart": True, "rank_group": group}


def of_any_role(values: Values) -> list[Values]:
    """Returns the flags of every kind of worker that a scheduler may have."""
    given = [name for name in ROLE_NAMES if any(values.is_given(f"{name}.{flag}") for flag in PER_ROLE)]
    return [values, *(values.of_role(name) for name in given)]


def _of_role(values: Values, role: KVRole | None) -> Values:
    return values if role in (None, KVRole.BOTH) else values.of_role(role.value)


def num_expert_replicas(workers: WorkersOfRole, model: Checkpoint) -> int:
    """Returns how many workers have the experts together; 1: each worker has all of them, or the model has none.

    Raises ConfigError for replicas that cannot be.
    """
    values, size, num = workers.values, workers.size, num_experts(model.config)
    if size == 1 or not values.get(EXPERTS, bool) or values["worker-cls"] == "mock" or not num:
        return 1
    of_role = f"{workers.role}.{REPLICAS}"
    flag = of_role if values.is_given(of_role) else REPLICAS
    where = f"{values.where(EXPERTS)} with {values.where(flag)} {size}"
    if values["model-impl"] == "transformers" or not _is_known(model):
        raise ConfigError(f"{where}: not built for models that run by their class in transformers")
    ranks = size * values.get("tensor-parallel-size", int)
    if num < ranks:
        raise ConfigError(f"{where}: {num} experts cannot be on {ranks} ranks")
    return size


def _is_known(model: Checkpoint) -> bool:
    names = model.config.get("architectures")
    return not isinstance(names, list) or find_architecture(names) is not None
