"""`blockyard run`, `ring` and `keys`: a ring over several machines or containers."""

import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from blockyard.services.launcher import executors, rank_host, sources
from blockyard.services.launcher.models import model_files
from blockyard.services.launcher.supervision.child import exec_service
from blockyard.services.launcher.supervision.run_dir import SERVICES
from blockyard.shared.bus import curve, ring_query
from blockyard.shared.config import adapters, kv_transfer, output_parsers, resolve, worker_roles
from blockyard.shared.config.checkpoint import Checkpoint
from blockyard.shared.config.flags import FLAGS
from blockyard.shared.config.flags.roles import ROLE_NAMES
from blockyard.shared.config.parsed_flags import ParsedFlag, Values
from blockyard.shared.config.resolve import ServiceStruct
from blockyard.shared.config.server import http_server
from blockyard.shared.config.services.lora import AdapterSource
from blockyard.shared.config.services.process import BusConfig, ProcessConfig
from blockyard.shared.config.services.worker import WorkerConfig
from blockyard.shared.errors import ConfigError

REGISTRY_PORT = 5700
OF_ALL_SERVICES = ("config", "model")  # a gateway reads the model's name if --served-model-name is not given
ANSWER_S = 5.0  # longest wait for the registry's answer


def run(args: Sequence[str]) -> int:
    """`blockyard run SERVICE`: replaces this process with the service's. Raises ConfigError.

    With --nnodes or --data-parallel-rank it stays, and starts the worker again when its group has ended.
    """
    values, positionals, notes = sources.read(args, os.environ)
    service = (positionals or [""])[0].replace("-", "_")
    if service not in SERVICES:
        known = ", ".join(name.replace("_", "-") for name in SERVICES)
        raise ConfigError(f"run {service or 'SERVICE'}: the services are {known}")
    if len(positionals) > 2:
        raise ConfigError(f"run {service}: expected one model, got {' '.join(positionals[1:])}")
    if len(positionals) == 2:
        values = sources.with_model(values, positionals[1])
    is_replica = service == "gpu_worker" and values.is_given("data-parallel-rank")
    if values.get("data-parallel-size", int) > 1 and not is_replica:
        where = values.where("data-parallel-size")
        raise ConfigError(
            f"{where}: `run` starts one process; start more gpu-workers, they share one scheduler; with "
            "--enable-expert-parallel, give each its --data-parallel-rank"
        )
    for name in (f"{role}{rest}" for role in ROLE_NAMES for rest in ("-workers", ".data-parallel-size")):
        if values.is_given(name):
            raise ConfigError(f"{values.where(name)}: `run` starts one process; give gpu-workers a --role")
    config = service_config(service, values)
    is_local = config.process.bus.bind.startswith("ipc://")
    of_worker = resolve.worker_notes(values, is_local) if service == "gpu_worker" else []
    of_gateway = [*http_server.notes(values), *_unread_notes(values)] if service == "api_gateway" else []
    of_model = resolve.model_notes(values, find_model(service, values)) if service == "scheduler" else []
    for note in (*notes, *values.notes(), *of_worker, *of_gateway, *of_model):
        print(note, file=sys.stderr)
    if isinstance(config, WorkerConfig) and (config.num_nodes > 1 or config.replicas_apart):
        return rank_host.run(config, values.get("hung-timeout", float))
    return exec_service(service, config)


def _unread_notes(values: Values) -> list[str]:
    """Returns a line that names the flags that the settings of a gateway were made without, or nothing."""
    unread = [values.where(name) for name in values.unread() if name not in OF_ALL_SERVICES and not FLAGS[name].mapped]
    if not unread:
        return []
    return [f"{', '.join(unread)}: no effect on a gateway; models' settings are flags of the services that run them"]


def service_config(service: str, values: Values) -> ServiceStruct:
    """Returns the settings of one service. Finds only the model files that it needs. Raises ConfigError."""
    name = values.maybe("name", str) or f"{service} {socket.gethostname()}"
    if service == "gpu_worker" and (number := values.maybe("data-parallel-rank", int)) is not None:
        name = f"{values.maybe('name', str) or service} {number}"  # replicas may have one --name
    process = resolve.process_config(values, name, bus_config(values))
    model = find_model(service, values)
    match service:
        case "message_bus":
            return resolve.registry(process)
        case "api_gateway":
            return resolve.gateway(values, process)
        case "tokenizer_pool":
            return resolve.tokenizer(values, model, process)
        case "detokenizer":
            return resolve.detokenizer(values, model, process)
        case "scheduler":
            if values["device"] == "auto":  # workers run elsewhere and report their own limits
                values = values.with_given({"device": ParsedFlag("cuda", "device")})
            model = msgspec.structs.replace(model, adapters=_adapters_of_workers(values))
            return resolve.scheduler(values, model, process)
        case _:
            of_role = worker_roles.of_process(values)
            [config] = resolve.workers([of_role], model, lambda _: _with_advertised(process, values))
            config = msgspec.structs.replace(config, **worker_roles.of_replica(values, model, process.bus))
            return executors.choose([config], values, os.environ)[0]


def _with_advertised(process: ProcessConfig, values: Values) -> ProcessConfig:
    """Ranks of other hosts dial the address that --bind names, if --advertise gives no other."""
    bus = process.bus
    address = bus.bind.removeprefix("tcp://")
    is_on_several = values.get("nnodes", int) > 1 or values.is_given("data-parallel-rank")
    if is_on_several and not bus.advertise and address.replace(".", "").isdigit():
        bus = msgspec.structs.replace(bus, advertise=address)
    return msgspec.structs.replace(process, bus=bus)


def find_model(service: str, values: Values) -> Checkpoint:
    """Finds weights for a worker, a tokenizer for text services, and for others only what a flag needs."""
    if service == "gpu_worker":
        return model_files.find(values)
    if service in ("tokenizer_pool", "detokenizer"):
        return model_files.find(values, weights=False)
    if service == "scheduler" and (found := _files_of_scheduler(values)):
        return found
    return Checkpoint(name=values.get("model", str), path=Path(), tokenizer_path=Path())


def _adapters_of_workers(values: Values) -> list[AdapterSource]:
    """Returns the adapters that a server begins with, whose folders workers have and check. Raises ConfigError."""
    found = adapters.sources(values)
    for source in found:
        if not Path(source.path).is_absolute():
            raise ConfigError(
                f"run scheduler: adapter {source.name}: path {source.path} is not absolute: every worker's machine has "
                "to have the same folder"
            )
    return found


def _files_of_scheduler(values: Values) -> Checkpoint | None:
    """Returns the model's files if a flag depends on them. Raises ConfigError, which names the flag, without them."""
    about_config = {
        "enable-chunked-prefill": not values.get("enable-chunked-prefill", bool),
        "disable-sliding-window": values.get("disable-sliding-window", bool),
    }
    need_config = [values.where(name) for name, is_given in about_config.items() if is_given]
    of_generation = [values.where("generation-config")] if values["generation-config"] == "auto" else []
    flags = [*need_config, *of_generation, *output_parsers.autos(values)]
    if not flags:
        return None
    try:
        found = model_files.find(values, weights=False)
    except ConfigError as e:
        raise ConfigError(f"run scheduler: {', '.join(flags)} needs the model's files: {e}") from e
    if need_config and not found.config:
        raise ConfigError(f"run scheduler: {', '.join(need_config)} needs {found.path / 'config.json'}: no such file")
    return found


def bus_config(values: Values) -> BusConfig:
    """Reads --message-bus, or a --run-dir that all processes share. tcp needs --curve-keys. Raises ConfigError."""
    run_dir, registry = values.maybe("run-dir", str), values.maybe("message-bus", str)
    if registry is None and run_dir is None:
        raise ConfigError(f"run: --message-bus is needed, e.g. tcp://message-bus:{REGISTRY_PORT}")
    if registry is None:
        return BusConfig(registry=f"ipc://{run_dir}/message-bus", bind=values.maybe("bind", str) or f"ipc://{run_dir}")
    try:
        if registry.startswith("ipc://"):
            return BusConfig(registry=registry, bind=values.maybe("bind", str) or registry.rpartition("/")[0])
        return _tcp_bus(values, registry)
    except ValueError as e:
        raise ConfigError(str(e)) from e


def _tcp_bus(values: Values, registry: str) -> BusConfig:
    keys = values.maybe("curve-keys", str)
    if keys is None:
        raise ConfigError(f"--message-bus {registry}: tcp needs --curve-keys DIR; `blockyard keys DIR` writes them")
    if not registry.rpartition(":")[2].isdigit():
        registry = f"{registry}:{REGISTRY_PORT}"
    return BusConfig(
        registry=registry,
        bind=values.maybe("bind", str) or "tcp://0.0.0.0",
        advertise=kv_transfer.advertised(values) or "",
        curve_public=str(Path(keys) / curve.PUBLIC_NAME),
        curve_secret=str(Path(keys) / curve.SECRET_NAME),
    )


def ring(args: Sequence[str]) -> int:
    """`blockyard ring`: prints the members. With --check: returns 1 and the reason if this host's are not ready.

    Raises BlockyardError.
    """
    check = "--check" in args
    values, positionals, _ = sources.read([word for word in args if word != "--check"], os.environ)
    if positionals:
        raise ConfigError(f"expected flags and --check, got {positionals[0]}")
    found = ring_query.ask_members(bus_config(values), ANSWER_S)
    if not check:
        print("\n".join(ring_query.as_lines(found.members)))
        return 0
    reason = ring_query.not_ready(found.members, values.maybe("advertise", str) or socket.gethostname())
    if reason:
        print(reason, file=sys.stderr)
    return 1 if reason else 0


def keys(args: Sequence[str]) -> int:
    """`blockyard keys DIR`: writes the key pair of a deployment. Raises ConfigError, also if there are keys already."""
    if len(args) != 1 or args[0].startswith("-"):
        raise ConfigError("expected a folder: blockyard keys DIR")
    folder = Path(args[0])
    try:
        curve.write_keys(folder)
    except OSError as e:
        raise ConfigError(f"{folder}: {e.strerror}") from e
    print(f"wrote {folder / curve.PUBLIC_NAME} and {folder / curve.SECRET_NAME}: every member needs both")
    return 0
