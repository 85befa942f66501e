"""KV transfers between workers: the keys of --kv-transfer-config, which are vLLM's, and --role and --pd-faults.

Each key is honoured, mapped to a setting of ours with a note, or refused.
"""

import difflib
from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any, Literal

import msgspec

from blockyard.shared.config.parsed_flags import Values
from blockyard.shared.config.services.process import BusConfig
from blockyard.shared.config.services.worker import KVTransferConfig, KVTransferFaults
from blockyard.shared.config.worker_fields import kv_on_gpu
from blockyard.shared.errors import ConfigError
from blockyard.shared.messages import KVRole

FLAG = "kv-transfer-config"
NIXL_PACKAGES = ("nixl", "nixl_cu13", "nixl_cu12")
OFFLOADING = "OffloadingConnector"

_CONNECTORS = {name: name for name in ("auto", "cuda_ipc", "shm", "tcp", "nixl")}
_CONNECTORS |= {"NixlConnector": "nixl", "NixlPushConnector": "nixl", "P2pNcclConnector": "cuda_ipc"}
_REFUSED_CONNECTORS = {
    "LMCacheConnectorV1": "for KV blocks in host memory give --swap-space, between workers use auto",
    "MooncakeConnector": "use nixl for RDMA, or tcp",
    "MooncakeStoreConnector": "there is no store outside of workers: for KV blocks in host memory give --swap-space",
    "MultiConnector": "name one; auto takes the quickest for each pair of workers, and --swap-space works beside it",
}
_ROLES = {"kv_producer": KVRole.PREFILL, "kv_consumer": KVRole.DECODE, "kv_both": KVRole.BOTH}
_NO_EFFECT = {
    "engine_id": "a worker is known by --name, and by a number drawn at each start",
    "kv_rank": "workers find each other in the membership list",
    "kv_parallel_size": "workers join and leave at any time",
    "kv_buffer_size": "buffers have sizes of their own, of nixl up to 1 GiB of a GPU for all links",
    "kv_buffer_device": "buffers have sizes of their own, of nixl up to 1 GiB of a GPU for all links",
}


class ExtraKeys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The keys of `kv_connector_extra_config`."""

    backends: list[str] | str = []  # of nixl
    kv_lease_duration: float | None = None  # seconds
    encrypt: bool = True
    checksum: bool = True


class TransferKeys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The keys of --kv-transfer-config. An unset key is None."""

    kv_connector: str | None = None
    kv_role: str | None = None
    engine_id: str | int | None = None
    kv_rank: int | None = None
    kv_parallel_size: int | None = None
    kv_ip: str | None = None
    kv_port: int | None = None
    kv_buffer_size: int | float | None = None  # bytes
    kv_buffer_device: str | None = None
    kv_load_failure_policy: Literal["recompute", "fail"] | None = None
    kv_connector_module_path: str | None = None
    kv_connector_extra_config: ExtraKeys = ExtraKeys()

    @property
    def connector(self) -> str | None:
        """Our name of the connector."""
        return _CONNECTORS.get(self.kv_connector or "")

    @property
    def role(self) -> KVRole | None:
        return _ROLES.get(self.kv_role or "")


def keys_of(values: Values) -> TransferKeys:
    """Reads --kv-transfer-config. Raises ConfigError for a key that is unknown, refused or wrong."""
    where = values.where(FLAG)
    given = _without_nulls(values.maybe(FLAG, dict) or {})
    _check_names(where, given, TransferKeys.__struct_fields__)
    extra = given.get("kv_connector_extra_config")
    if isinstance(extra, dict):
        _check_names(f"{where}: kv_connector_extra_config", extra, ExtraKeys.__struct_fields__)
    try:
        keys = msgspec.convert(given, TransferKeys, strict=False)
    except msgspec.ValidationError as e:
        raise ConfigError(f"{where}: {e}") from e
    if refusal := _refusal(keys):
        raise ConfigError(f"{where}: {refusal}")
    return keys


def role_of(values: Values) -> KVRole | None:
    """Returns what --role or `kv_role` says of one process; None if neither is given. Raises ConfigError."""
    asked, keys = values.maybe("role", str), keys_of(values)
    if asked is None or keys.role is None:
        return KVRole(asked) if asked is not None else keys.role
    if keys.role != asked:
        raise ConfigError(f"{values.where('role')} {asked}: kv_role {keys.kv_role} of --{FLAG} disagrees")
    return keys.role


def offloads(values: Values) -> bool:
    """Returns whether the connector is vLLM's name for KV blocks in host memory, which is --swap-space."""
    return keys_of(values).kv_connector == OFFLOADING


def worker_config(values: Values, role: KVRole | None, bus: BusConfig) -> KVTransferConfig | None:
    """Returns a worker's settings of transfers; None without a role and a connector. Raises ConfigError.

    role: of this worker; None if no flag gives one. bus: the worker's own.
    """
    keys, where = keys_of(values), values.where(FLAG)
    faults = values.maybe("pd-faults", str)
    if role is None and keys.kv_connector is not None and not offloads(values):
        raise ConfigError(f"{where}: kv_connector needs kv_role: kv_producer, kv_consumer or kv_both")
    if role is None or (offloads(values) and role is KVRole.BOTH):
        if faults is not None:
            raise ConfigError(f"{values.where('pd-faults')}: this worker has no KV transfers; give it a role")
        return None
    if values.get("calculate-kv-scales", bool):
        raise ConfigError(
            f"{values.where('calculate-kv-scales')}: workers exchange KV blocks only with equal scales, and each would "
            "calculate its own; give --quantization-param-path"
        )
    extra, connector = keys.kv_connector_extra_config, keys.connector or "auto"
    if refusal := _connector_refusal(values, connector):
        raise ConfigError(f"{where}: kv_connector {keys.kv_connector}: {refusal}")
    if bus.bind.startswith("tcp://") and extra.encrypt and not bus.curve_public:
        raise ConfigError(
            f"{where}: KV transfers over tcp need --curve-keys DIR, which `blockyard keys DIR` writes, or "
            '"encrypt": false in kv_connector_extra_config'
        )
    fields: dict[str, Any] = {
        "role": role,
        "connector": connector,
        "backends": [extra.backends] if isinstance(extra.backends, str) else extra.backends,
        "encrypt": extra.encrypt,
        "checksums": extra.checksum,
        "port": (keys.kv_port or 0) if bus.bind.startswith("tcp://") else 0,
        "faults": read_faults(faults, values.where("pd-faults")) if faults is not None else KVTransferFaults(),
    }
    return msgspec.convert(fields, KVTransferConfig)


def scheduler_fields(values: Values) -> dict[str, Any]:
    """Returns the fields of SchedulerConfig that --kv-transfer-config sets. Raises ConfigError."""
    keys = keys_of(values)
    fields = {
        "kv_load_failure_policy": keys.kv_load_failure_policy,
        "kv_lease_s": keys.kv_connector_extra_config.kv_lease_duration,
    }
    return {name: value for name, value in fields.items() if value is not None}


def notes(values: Values, is_local: bool) -> list[str]:
    """Returns a line for each key that is mapped to another setting, or has no effect.

    is_local: all workers of the ring run on this machine, with their sockets in a folder.
    """
    keys, where = keys_of(values), values.where(FLAG)
    found = []
    if keys.kv_connector == "P2pNcclConnector":
        found.append("kv_connector P2pNcclConnector: is cuda_ipc, the GPU writes into the other GPU's memory, no NCCL")
    if offloads(values):
        found.append(f"kv_connector {OFFLOADING}: is --swap-space, KV blocks in host memory")
    without_effect = dict(_NO_EFFECT)
    if is_local:
        folder = "workers of one machine have their sockets in a folder, and no port"
        without_effect |= {"kv_ip": folder, "kv_port": folder}
    elif keys.kv_ip is not None and not values.is_given("advertise"):
        found.append(f"kv_ip {keys.kv_ip}: is --advertise, for all sockets of this process")
    for name, reason in without_effect.items():
        if (value := getattr(keys, name)) is not None:
            found.append(f"{name} {value}: has no effect, {reason}")
    return [f"{where}: {line}" for line in found]


def advertised(values: Values) -> str | None:
    """Returns the address for --advertise that `kv_ip` gives. Raises ConfigError if both are given and differ."""
    address, asked = keys_of(values).kv_ip, values.maybe("advertise", str)
    if address is not None and asked is not None and address != asked:
        raise ConfigError(f"{values.where(FLAG)}: kv_ip {address}: {values.where('advertise')} is {asked}; give one")
    return asked if asked is not None else address


def read_faults(text: str, where: str) -> KVTransferFaults:
    """Reads --pd-faults, as "drop=0.01,delay=50ms,flip=0.001". Raises ConfigError that begins with `where`."""
    found: dict[str, float] = {}
    for word in text.split(","):
        name, _, value = word.strip().partition("=")
        try:
            if name == "delay":
                found["delay_ms"] = float(value.removesuffix("ms"))
            elif name in ("drop", "flip"):
                found[name] = float(value)
            else:
                raise ValueError
        except ValueError as e:
            raise ConfigError(f"{where} {text}: expected drop=0.01,delay=50ms,flip=0.001 or a part of it") from e
    if not all(0 <= found.get(name, 0.0) <= 1 for name in ("drop", "flip")) or found.get("delay_ms", 0.0) < 0:
        raise ConfigError(f"{where} {text}: drop and flip are probabilities from 0 to 1, delay is not negative")
    return msgspec.convert(found, KVTransferFaults)


def has_nixl() -> bool:
    """Returns whether the package of the connector nixl is installed."""
    return any(find_spec(name) is not None for name in NIXL_PACKAGES)


def _refusal(keys: TransferKeys) -> str:
    """Returns why the keys by themselves are refused, or an empty string."""
    name, extra = keys.kv_connector, keys.kv_connector_extra_config
    if keys.kv_connector_module_path is not None:
        return "kv_connector_module_path: no code is loaded by name; use a kv_connector of " + ", ".join(_own_names())
    if name in _REFUSED_CONNECTORS:
        return f"kv_connector {name}: not built; {_REFUSED_CONNECTORS[name]}"
    if name is not None and name not in _CONNECTORS and name != OFFLOADING:
        return f"kv_connector {name}: unknown; use one of {', '.join(_own_names())}"
    if keys.kv_role is not None and keys.kv_role not in _ROLES:
        return f"kv_role {keys.kv_role}: unknown; use one of {', '.join(_ROLES)}"
    if name == OFFLOADING and keys.role not in (None, KVRole.BOTH):
        return f"kv_role {keys.kv_role}: {OFFLOADING} sends to no other worker; use --swap-space and a kv_connector"
    if keys.kv_port is not None and not 0 <= keys.kv_port <= 65535:
        return f"kv_port {keys.kv_port}: ports are 0 to 65535; 0 is any"
    if extra.backends and keys.connector not in (None, "auto", "nixl"):
        return f"backends {extra.backends}: are of the kv_connector nixl"
    if extra.kv_lease_duration is not None and extra.kv_lease_duration <= 0:
        return f"kv_lease_duration {extra.kv_lease_duration:g}: must be above 0 seconds"
    return ""


def _connector_refusal(values: Values, connector: str) -> str:
    """Returns why this machine's workers cannot use the connector, or an empty string."""
    has_gpu = kv_on_gpu(values)
    if connector == "cuda_ipc" and not has_gpu:
        return "needs GPUs, and these workers have their KV blocks in host memory; use shm, tcp or auto"
    if connector == "shm" and has_gpu:
        return "is for KV blocks in host memory, and these workers have theirs on GPUs; use cuda_ipc, tcp or auto"
    if connector == "nixl" and not has_nixl():
        return "needs the package nixl: pip install nixl-cu13"
    return ""


def _own_names() -> Iterable[str]:
    return (name for name, ours in _CONNECTORS.items() if name == ours)


def _without_nulls(keys: dict[str, Any]) -> dict[str, Any]:
    """A key that is null is unset, as in configurations that vLLM has written."""
    return {
        name: _without_nulls(value) if isinstance(value, dict) else value
        for name, value in keys.items()
        if value is not None
    }


def _check_names(where: str, given: dict[str, Any], known: tuple[str, ...]) -> None:
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            more = f"did you mean {close[0]}?" if close else f"the keys are {', '.join(known)}"
            raise ConfigError(f"{where}: no such key {name!r}; {more}")
