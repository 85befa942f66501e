"""Each container of compose/ starts a process of `blockyard run` with settings that it accepts."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from blockyard.services.launcher import sources
from blockyard.services.launcher.multi_host import service_config
from blockyard.shared.config.resolve import ServiceStruct
from blockyard.shared.config.services.worker import WorkerConfig
from blockyard.shared.messages import KVRole

FILE = Path(__file__).parents[3] / "compose" / "docker-compose.yml"
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load(FILE.read_text())["services"]


def settings(name: str) -> ServiceStruct:
    run, service, *args = SERVICES[name]["command"]
    assert run == "run"
    environ = {key: value.replace("${STACK_MODEL:-demo}", "demo") for key, value in _environment(name).items()}
    values, rest, notes = sources.read(args, environ)
    assert (rest, notes) == ([], [])
    return service_config(service.replace("-", "_"), values)


def _environment(name: str) -> dict[str, str]:
    return {
        key: "info" if key == "BLOCKYARD_LOG_LEVEL" else value for key, value in SERVICES[name]["environment"].items()
    }


@pytest.mark.parametrize("name", SERVICES)
def test_a_container_has_valid_settings(name: str) -> None:
    assert settings(name).process.bus.registry == "tcp://message-bus:5700"


@pytest.mark.parametrize(
    ("name", "role"),
    [("gpu-worker", None), ("prefill-worker", KVRole.PREFILL), ("decode-worker", KVRole.DECODE)],
)
def test_workers_have_their_roles(name: str, role: KVRole | None) -> None:
    config = settings(name)
    assert isinstance(config, WorkerConfig)
    assert (config.kv_transfer.role if config.kv_transfer is not None else None) is role
    assert SERVICES[name].get("profiles", []) == ([] if role is None else ["roles"]), "roles are optional"
