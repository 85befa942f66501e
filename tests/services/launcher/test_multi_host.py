"""`blockyard run SERVICE`: one process's settings."""

import os
import socket
from pathlib import Path

import msgspec
import pytest

from blockyard.services.launcher.models import model_files
from blockyard.services.launcher.multi_host import bus_config, run, service_config
from blockyard.services.launcher.supervision.ring import local_bus
from blockyard.services.launcher.supervision.run_dir import SERVICES
from blockyard.shared.config import worker_fields
from blockyard.shared.config.parsed_flags import Values, from_command_line
from blockyard.shared.config.resolve import resolve
from blockyard.shared.config.services.scheduler import SchedulerConfig
from blockyard.shared.config.services.worker import WorkerConfig
from blockyard.shared.errors import ConfigError

TCP = ("--message-bus", "tcp://message-bus:5700", "--curve-keys", "/keys")


def values(*args: str) -> Values:
    return Values(from_command_line(args)[0])


@pytest.mark.parametrize("service", SERVICES)
def test_every_service_has_settings_of_its_own(service: str) -> None:
    config = service_config(service, values("--model", "demo", *TCP))
    assert config.process.name == f"{service} {socket.gethostname()}"
    assert msgspec.json.decode(msgspec.json.encode(config), type=type(config)) == config


@pytest.mark.parametrize("service", ["message_bus", "api_gateway", "scheduler"])
def test_services_without_model_files_look_for_none(service: str) -> None:
    service_config(service, values("--model", "/no/such/folder", *TCP))


@pytest.mark.parametrize(
    "flag",
    ["--no-enable-chunked-prefill", "--disable-sliding-window", "--tool-call-parser auto", "--reasoning-parser auto"],
)
def test_a_scheduler_names_the_flag_that_needs_model_files(flag: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"^run scheduler: {flag} needs the model's files: .*no such folder"):
        service_config("scheduler", values("--model", "/no/such/folder", *TCP, *flag.split()))
    if "parser" not in flag:
        with pytest.raises(ConfigError, match=f"^run scheduler: {flag} needs {tmp_path}/config.json: no such file$"):
            service_config("scheduler", values("--model", str(tmp_path), *TCP, *flag.split()))


@pytest.mark.parametrize("service", ["tokenizer_pool", "detokenizer", "gpu_worker"])
def test_services_with_model_files_report_missing_ones(service: str) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        service_config(service, values("--model", "/no/such/folder", *TCP))


def test_a_scheduler_alone_leaves_the_step_to_the_workers_geometry() -> None:
    config = service_config("scheduler", values(*TCP))
    assert isinstance(config, SchedulerConfig)
    assert config.max_num_batched_tokens == 2048


def test_a_scheduler_alone_serves_the_adapters_that_workers_have() -> None:
    config = service_config("scheduler", values("--model", "/no/such/folder", *TCP, "--lora-modules", "a=/on/workers"))
    assert isinstance(config, SchedulerConfig)
    assert [(source.name, source.path) for source in config.adapters.sources] == [("a", "/on/workers")]
    with pytest.raises(ConfigError, match="adapter a: path org/a is not absolute"):
        service_config("scheduler", values(*TCP, "--lora-modules", "a=org/a"))


def test_generation_defaults_reach_a_scheduler_run_alone() -> None:
    config = service_config("scheduler", values("--model", "demo", "--generation-config", "auto", *TCP))
    assert isinstance(config, SchedulerConfig)
    assert config.model.defaults.temperature == 0.7


@pytest.mark.parametrize(
    ("args", "registry", "bind"),
    [
        (TCP, "tcp://message-bus:5700", "tcp://0.0.0.0"),
        (("--message-bus", "tcp://bus", "--curve-keys", "/k"), "tcp://bus:5700", "tcp://0.0.0.0"),
        ((*TCP, "--bind", "tcp://10.0.0.1"), "tcp://message-bus:5700", "tcp://10.0.0.1"),
        (("--message-bus", "ipc:///run/by/message-bus"), "ipc:///run/by/message-bus", "ipc:///run/by"),
        (("--run-dir", "/run/by"), "ipc:///run/by/message-bus", "ipc:///run/by"),
    ],
)
def test_buses(args: tuple[str, ...], registry: str, bind: str) -> None:
    bus = bus_config(values(*args))
    assert (bus.registry, bus.bind) == (registry, bind)
    assert bool(bus.curve_secret) == registry.startswith("tcp")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((), "--message-bus is needed"),
        (("--message-bus", "tcp://b:1"), "tcp needs --curve-keys DIR"),
        (("--message-bus", "udp://b:1", "--curve-keys", "/k"), "must begin with ipc:// or tcp://, got 'udp://b:1'"),
    ],
)
def test_bad_buses(args: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        bus_config(values(*args))


def test_advertise(tmp_path: Path) -> None:
    assert bus_config(values(*TCP, "--advertise", "10.0.0.9")).advertise == "10.0.0.9"


def test_a_worker_process_has_a_role_and_the_address_of_its_config() -> None:
    keys = ("--kv-transfer-config", '{"kv_role": "kv_producer", "kv_ip": "10.0.0.7", "kv_port": 14579}')
    config = service_config("gpu_worker", values("--model", "demo", *TCP, *keys))
    assert isinstance(config, WorkerConfig) and config.kv_transfer is not None
    assert (config.kv_transfer.role, config.kv_transfer.port) == ("prefill", 14579)
    assert config.process.bus.advertise == "10.0.0.7"


@pytest.mark.parametrize("flag", ["--prefill-workers", "--decode-workers"])
def test_a_process_has_one_role(flag: str) -> None:
    with pytest.raises(ConfigError, match=f"^{flag}: `run` starts one process; give gpu-workers a --role$"):
        run(["gpu-worker", "demo", *TCP, flag, "2"])


def test_a_replica_is_a_process_with_a_number() -> None:
    asked = ("-dp", "3", "--data-parallel-rank", "2", "--enable-expert-parallel", "--bind", "tcp://10.0.0.7")
    config = service_config("gpu_worker", values("--model", "demo", *TCP, *asked, "--name", "left"))
    assert isinstance(config, WorkerConfig)
    assert (config.process.name, config.process.bus.advertise) == ("left 2", "10.0.0.7")
    assert not config.replicas_apart, "a model without experts"
    here = values("--model", "demo", "--data-parallel-rank", "0")
    with pytest.raises(ConfigError, match="--data-parallel-rank: is for `blockyard run gpu-worker`"):
        worker_fields.check_one_host(here)


def test_two_models_are_too_many() -> None:
    with pytest.raises(ConfigError, match=r"^model a and --model b: which one"):
        run(["gpu-worker", "a", "--model", "b"])


def test_a_process_is_one_worker() -> None:
    with pytest.raises(ConfigError, match="--data-parallel-size: `run` starts one process"):
        run(["gpu-worker", "demo", *TCP, "--data-parallel-size", "2"])


@pytest.mark.parametrize(("service", "num_notes"), [("gpu-worker", 2), ("scheduler", 1)])
def test_a_flag_with_another_effect_prints_a_note(
    service: str, num_notes: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "execve", lambda path, words, environ: None)
    flags = ["--num-scheduler-steps", "4", "--swap-space", "0.5", "--preemption-mode", "recompute"]
    run([service, "demo", "--worker-cls", "mock", *TCP, *flags])
    said = capsys.readouterr().err.splitlines()
    expected = ["N above 1 is --run-ahead N-1", "no host memory is taken"][:num_notes]
    assert len(said) == num_notes and all(words in line for words, line in zip(expected, said, strict=True))


def test_a_gateway_names_the_flags_that_it_has_no_use_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "execve", lambda path, words, environ: None)
    monkeypatch.setenv("BLOCKYARD_MAX_NUM_SEQS", "4")
    run(["api-gateway", "demo", *TCP, "--tool-call-parser", "hermes", "--port", "1", "--served-model-name", "m"])
    assert capsys.readouterr().err.splitlines() == [
        "BLOCKYARD_MAX_NUM_SEQS, --tool-call-parser: no effect on a gateway; "
        "models' settings are flags of the services that run them"
    ]
    monkeypatch.delenv("BLOCKYARD_MAX_NUM_SEQS")
    run(["api-gateway", "demo", *TCP, "--port", "1", "--allowed-origins", '["a"]'])
    assert capsys.readouterr().err == ""


HOSTS = ("--model", "demo", *TCP, "-tp", "2", "-pp", "2", "--nnodes", "2", "--bind", "tcp://10.0.0.7")


def test_a_worker_has_a_share_of_the_ranks_on_several_hosts() -> None:
    config = service_config("gpu_worker", values(*HOSTS, "--node-rank", "1", "--rank-timeout", "7"))
    assert isinstance(config, WorkerConfig)
    assert (config.host_ranks, config.rank_timeout_s, config.rank_group) == (range(2, 4), 7.0, "gpu_worker")
    assert config.process.bus.advertise == "10.0.0.7"
    named = service_config("gpu_worker", values(*HOSTS, "--name", "left", "--advertise", "host-a"))
    assert isinstance(named, WorkerConfig)
    assert (named.host_ranks, named.rank_group, named.process.bus.advertise) == (range(2), "left", "host-a")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--node-rank", "2"), "--node-rank 2: the hosts of --nnodes 2 have numbers below 2"),
        (("--nnodes", "3"), "--nnodes 3: each host has as many ranks, and there are 4"),
        (("--worker-cls", "mock"), "--nnodes 2: a mock worker has one rank"),
        (("--bind", "tcp://0.0.0.0"), "--nnodes 2: --bind tcp://ADDRESS is needed"),
    ],
)
def test_hosts_that_cannot_be(args: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        service_config("gpu_worker", values(*HOSTS, *args))


def test_a_ring_on_one_machine_has_no_other_hosts(tmp_path: Path) -> None:
    asked = values("--model", "demo", "--nnodes", "2", "-tp", "2")
    with pytest.raises(ConfigError, match="--nnodes: is for `blockyard run gpu-worker`, on each host"):
        resolve(asked, model_files.find(asked), local_bus(tmp_path))
