"""--kv-transfer-config: each key is honoured, mapped with a note, or refused by name."""

from typing import Any

import msgspec
import pytest

from blockyard.shared.config import host_memory, kv_transfer, parsed_flags
from blockyard.shared.config.parsed_flags import Values
from blockyard.shared.config.services.process import BusConfig
from blockyard.shared.config.services.worker import KVTransferConfig, KVTransferFaults
from blockyard.shared.errors import ConfigError
from blockyard.shared.messages import KVRole

IPC = BusConfig(registry="ipc:///run/x/message-bus", bind="ipc:///run/x")
TCP = BusConfig(registry="tcp://bus:5700", bind="tcp://0.0.0.0", curve_public="/k/p", curve_secret="/k/s")
NO_KEYS = BusConfig(registry="ipc:///run/x/message-bus", bind="tcp://0.0.0.0")
NO_BUFFER = "has no effect, buffers have sizes of their own, of nixl up to 1 GiB of a GPU for all links"
WHERE = "--kv-transfer-config: "


def values(keys: dict[str, Any] | None = None, *more: str, device: str = "cpu") -> Values:
    words = ["--kv-transfer-config", msgspec.json.encode(keys).decode()] if keys is not None else []
    return Values(parsed_flags.from_command_line([*words, "--device", device, *more])[0])


def config(keys: dict[str, Any], *more: str, bus: BusConfig = IPC, device: str = "cpu") -> KVTransferConfig:
    given = values({"kv_role": "kv_both"} | keys, *more, device=device)
    made = kv_transfer.worker_config(given, kv_transfer.role_of(given), bus)
    assert made is not None
    return made


def refusal(given: Values, bus: BusConfig = IPC) -> str:
    with pytest.raises(ConfigError) as error:
        kv_transfer.worker_config(given, kv_transfer.role_of(given), bus)
    return str(error.value)


@pytest.mark.parametrize(
    ("name", "device", "ours"),
    [
        ("auto", "cpu", "auto"),
        ("shm", "cpu", "shm"),
        ("tcp", "cpu", "tcp"),
        ("tcp", "cuda", "tcp"),
        ("cuda_ipc", "cuda", "cuda_ipc"),
        ("P2pNcclConnector", "cuda", "cuda_ipc"),
    ],
)
def test_connectors(name: str, device: str, ours: str) -> None:
    assert config({"kv_connector": name}, device=device).connector == ours


@pytest.mark.parametrize("name", ["nixl", "NixlConnector", "NixlPushConnector"])
def test_nixl_needs_its_package(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_transfer, "has_nixl", lambda: True)
    assert config({"kv_connector": name}).connector == "nixl"
    monkeypatch.setattr(kv_transfer, "has_nixl", lambda: False)
    said = refusal(values({"kv_connector": name, "kv_role": "kv_both"}))
    assert said == f"{WHERE}kv_connector {name}: needs the package nixl: pip install nixl-cu13"


def test_the_package_of_nixl_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_transfer, "NIXL_PACKAGES", ("no_such_package", "msgspec"))
    assert kv_transfer.has_nixl()
    monkeypatch.setattr(kv_transfer, "NIXL_PACKAGES", ("no_such_package",))
    assert not kv_transfer.has_nixl()


@pytest.mark.parametrize(
    ("name", "role"),
    [("kv_producer", KVRole.PREFILL), ("kv_consumer", KVRole.DECODE), ("kv_both", KVRole.BOTH)],
)
def test_roles(name: str, role: KVRole) -> None:
    assert config({"kv_role": name}).role is role
    assert config({"kv_role": name}).connector == "auto", "a role alone is enough"
    assert kv_transfer.role_of(values(None, "--role", role.value)) is role
    assert kv_transfer.role_of(values({"kv_role": name}, "--role", role.value)) is role


def test_no_role_and_no_connector_is_no_transfer() -> None:
    for given in (values(), values({}), values({"kv_load_failure_policy": "fail"})):
        assert kv_transfer.role_of(given) is None
        assert kv_transfer.worker_config(given, None, IPC) is None


def test_keys_that_are_honoured() -> None:
    plain, extra = config({}), "kv_connector_extra_config"
    assert plain == KVTransferConfig()
    assert config({extra: {"encrypt": False}}).encrypt is False
    assert config({extra: {"checksum": False}}).checksums is False
    assert config({extra: {"backends": ["UCX", "GDS"]}}).backends == ["UCX", "GDS"]
    assert config({extra: {"backends": "UCX"}}).backends == ["UCX"]
    assert config({"kv_port": 14579}, bus=TCP).port == 14579
    assert config({"kv_port": 14579}, bus=IPC).port == 0, "sockets in a folder have no port"
    assert kv_transfer.scheduler_fields(values({"kv_load_failure_policy": "fail"})) == {
        "kv_load_failure_policy": "fail"
    }
    assert kv_transfer.scheduler_fields(values({extra: {"kv_lease_duration": 7}})) == {"kv_lease_s": 7.0}
    assert kv_transfer.scheduler_fields(values()) == {}


def test_the_address_is_the_one_of_advertise() -> None:
    assert kv_transfer.advertised(values({"kv_ip": "10.0.0.7"})) == "10.0.0.7"
    assert kv_transfer.advertised(values({"kv_ip": "10.0.0.7"}, "--advertise", "10.0.0.7")) == "10.0.0.7"
    assert kv_transfer.advertised(values(None, "--advertise", "host")) == "host"
    with pytest.raises(ConfigError) as error:
        kv_transfer.advertised(values({"kv_ip": "10.0.0.7"}, "--advertise", "host"))
    assert str(error.value) == f"{WHERE}kv_ip 10.0.0.7: --advertise is host; give one"


@pytest.mark.parametrize(
    ("key", "value", "note"),
    [
        (
            "engine_id",
            "e7",
            "engine_id e7: has no effect, a worker is known by --name, and by a number drawn at each start",
        ),
        ("kv_rank", 1, "kv_rank 1: has no effect, workers find each other in the membership list"),
        ("kv_parallel_size", 2, "kv_parallel_size 2: has no effect, workers join and leave at any time"),
        ("kv_buffer_size", 1e9, f"kv_buffer_size 1000000000.0: {NO_BUFFER}"),
        ("kv_buffer_device", "cuda", f"kv_buffer_device cuda: {NO_BUFFER}"),
        ("kv_ip", "10.0.0.7", "kv_ip 10.0.0.7: is --advertise, for all sockets of this process"),
        (
            "kv_connector",
            "P2pNcclConnector",
            "kv_connector P2pNcclConnector: is cuda_ipc, the GPU writes into the other GPU's memory, no NCCL",
        ),
    ],
)
def test_keys_that_are_mapped_say_so(key: str, value: object, note: str) -> None:
    assert kv_transfer.notes(values({key: value}), is_local=False) == [f"{WHERE}{note}"]
    assert kv_transfer.notes(values({key: None}), is_local=False) == [], "null is unset"
    assert kv_transfer.notes(values(), is_local=False) == []


def test_an_address_and_a_port_have_no_effect_on_one_machine() -> None:
    said = kv_transfer.notes(values({"kv_ip": "127.0.0.1", "kv_port": 14579}), is_local=True)
    reason = "has no effect, workers of one machine have their sockets in a folder, and no port"
    assert said == [f"{WHERE}kv_ip 127.0.0.1: {reason}", f"{WHERE}kv_port 14579: {reason}"]
    assert kv_transfer.notes(values({"kv_port": 14579}), is_local=False) == []


def test_offloading_is_host_memory() -> None:
    keys = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    given = values(keys)
    assert kv_transfer.worker_config(given, kv_transfer.role_of(given), IPC) is None
    assert host_memory.swap_space(given) == host_memory.USUAL_GIB
    assert host_memory.swap_space(values(keys, "--swap-space", "2")) == 2.0
    (note,) = kv_transfer.notes(given, is_local=True)
    assert note == f"{WHERE}kv_connector OffloadingConnector: is --swap-space, KV blocks in host memory"
    assert host_memory.swap_space(values()) == 0.0


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        (
            {"kv_connector": "FooConnector", "kv_role": "kv_both"},
            "kv_connector FooConnector: unknown; use one of auto, cuda_ipc, shm, tcp, nixl",
        ),
        ({"kv_role": "producer"}, "kv_role producer: unknown; use one of kv_producer, kv_consumer, kv_both"),
        ({"kv_connector": "tcp"}, "kv_connector needs kv_role: kv_producer, kv_consumer or kv_both"),
        ({"kv_conector": "tcp"}, "no such key 'kv_conector'; did you mean kv_connector?"),
        (
            {"kv_connector_extra_config": {"send_type": "PUT"}},
            "kv_connector_extra_config: no such key 'send_type'; the keys are backends, kv_lease_duration, encrypt, "
            "checksum",
        ),
        (
            {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"},
            "kv_connector LMCacheConnectorV1: not built; for KV blocks in host memory give --swap-space, between "
            "workers use auto",
        ),
        (
            {"kv_connector": "MooncakeConnector", "kv_role": "kv_both"},
            "kv_connector MooncakeConnector: not built; use nixl for RDMA, or tcp",
        ),
        (
            {"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both"},
            "kv_connector MooncakeStoreConnector: not built; there is no store outside of workers: for KV blocks in "
            "host memory give --swap-space",
        ),
        (
            {"kv_connector": "MultiConnector", "kv_role": "kv_both"},
            "kv_connector MultiConnector: not built; name one; auto takes the quickest for each pair of workers, and "
            "--swap-space works beside it",
        ),
        (
            {"kv_connector": "OffloadingConnector", "kv_role": "kv_producer"},
            "kv_role kv_producer: OffloadingConnector sends to no other worker; use --swap-space and a kv_connector",
        ),
        (
            {"kv_connector_module_path": "my.code"},
            "kv_connector_module_path: no code is loaded by name; use a kv_connector of auto, cuda_ipc, shm, tcp, nixl",
        ),
        (
            {"kv_connector": "cuda_ipc", "kv_role": "kv_both"},
            "kv_connector cuda_ipc: needs GPUs, and these workers have their KV blocks in host memory; use shm, tcp "
            "or auto",
        ),
        (
            {"kv_load_failure_policy": "retry"},
            "Invalid enum value 'retry' - at `$.kv_load_failure_policy`",
        ),
        ({"kv_rank": "first"}, "Expected `int | null`, got `str` - at `$.kv_rank`"),
        ({"kv_parallel_size": [2]}, "Expected `int | null`, got `array` - at `$.kv_parallel_size`"),
        ({"engine_id": {}}, "Expected `int | str | null`, got `object` - at `$.engine_id`"),
        ({"kv_buffer_size": "big"}, "Expected `int | float | null`, got `str` - at `$.kv_buffer_size`"),
        ({"kv_buffer_device": 1}, "Expected `str | null`, got `int` - at `$.kv_buffer_device`"),
        ({"kv_ip": 1}, "Expected `str | null`, got `int` - at `$.kv_ip`"),
        ({"kv_port": 70000}, "kv_port 70000: ports are 0 to 65535; 0 is any"),
        (
            {"kv_connector_extra_config": {"kv_lease_duration": 0}},
            "kv_lease_duration 0: must be above 0 seconds",
        ),
        (
            {"kv_connector": "tcp", "kv_role": "kv_both", "kv_connector_extra_config": {"backends": ["UCX"]}},
            "backends ['UCX']: are of the kv_connector nixl",
        ),
    ],
)
def test_what_is_refused_is_one_line(keys: dict[str, Any], line: str) -> None:
    assert refusal(values(keys)) == WHERE + line


def test_shared_memory_is_not_for_gpus() -> None:
    given = values({"kv_connector": "shm", "kv_role": "kv_both"}, device="cuda")
    assert refusal(given) == (
        f"{WHERE}kv_connector shm: is for KV blocks in host memory, and these workers have theirs on GPUs; use "
        "cuda_ipc, tcp or auto"
    )
    mock = values({"kv_connector": "cuda_ipc", "kv_role": "kv_both"}, "--worker-cls", "mock", device="cuda")
    assert "kv_connector cuda_ipc: needs GPUs" in refusal(mock)


@pytest.mark.parametrize("connector", ["auto", "tcp"])
def test_tcp_needs_keys_or_no_encryption(connector: str) -> None:
    keys = {"kv_connector": connector, "kv_role": "kv_both"}
    assert refusal(values(keys), NO_KEYS) == (
        f"{WHERE}KV transfers over tcp need --curve-keys DIR, which `blockyard keys DIR` writes, or "
        '"encrypt": false in kv_connector_extra_config'
    )
    assert config(keys, bus=TCP).encrypt
    assert not config(keys | {"kv_connector_extra_config": {"encrypt": False}}, bus=NO_KEYS).encrypt


def test_a_role_that_the_config_contradicts() -> None:
    with pytest.raises(ConfigError) as error:
        kv_transfer.role_of(values({"kv_role": "kv_consumer"}, "--role", "prefill"))
    assert str(error.value) == "--role prefill: kv_role kv_consumer of --kv-transfer-config disagrees"


@pytest.mark.parametrize(
    "words",
    [
        ["--kv-transfer-config.kv_role", "kv_producer", "--kv_transfer_config.kv-connector=tcp"],
        ["--kv-transfer-config.kv_role=kv_producer", "--kv-transfer-config", '{"kv_connector": "tcp"}'],
        [
            *("--kv-transfer-config", '{"kv_connector": "tcp", "kv_role": "kv_both"}'),
            *("--kv-transfer-config.kv_role", "kv_producer"),
        ],
    ],
)
def test_keys_one_at_a_time(words: list[str]) -> None:
    given = Values(parsed_flags.from_command_line([*words, "--device", "cpu"])[0])
    assert given["kv-transfer-config"] == {"kv_role": "kv_producer", "kv_connector": "tcp"}
    assert kv_transfer.role_of(given) is KVRole.PREFILL
    assert given.where("kv-transfer-config") == "--kv-transfer-config"


@pytest.mark.parametrize("text", ["false", "False", "0"])
def test_inner_keys_one_at_a_time(text: str) -> None:
    extra = "--kv-transfer-config.kv_connector_extra_config"
    given = values(None, f"{extra}.encrypt", text, f"{extra}.checksum=false", f"{extra}.backends", '["UCX"]')
    keys = kv_transfer.keys_of(given).kv_connector_extra_config
    assert (keys.encrypt, keys.checksum, keys.backends) == (False, False, ["UCX"])
    numbers = values(None, "--kv-transfer-config.kv_rank", "1", "--kv-transfer-config.engine_id", "17")
    assert (kv_transfer.keys_of(numbers).kv_rank, kv_transfer.keys_of(numbers).engine_id) == (1, 17)


def test_keys_in_a_file() -> None:
    given = parsed_flags.from_mapping(
        {"kv-transfer-config.kv_role": "kv_both", "kv_transfer_config": {"kv_port": 7}}, "f"
    )
    assert given["kv-transfer-config"].value == {"kv_role": "kv_both", "kv_port": 7}
    assert parsed_flags.from_mapping({"kv-transfer-config.kv_role": 1}, "f")["kv-transfer-config"].where == (
        "f: kv-transfer-config"
    )


def test_single_keys_change_the_object_of_the_environment() -> None:
    text = '{"kv_connector": "tcp", "kv_role": "kv_both", "kv_connector_extra_config": {"checksum": false}}'
    environment, _ = parsed_flags.from_environment({"BLOCKYARD_KV_TRANSFER_CONFIG": text})
    extra = "--kv-transfer-config.kv_connector_extra_config.encrypt"
    line, _ = parsed_flags.from_command_line(["--kv-transfer-config.kv_role", "kv_producer", extra, "false"])
    whole = {"checksum": False, "encrypt": False}
    merged = {"kv_connector": "tcp", "kv_role": "kv_producer", "kv_connector_extra_config": whole}
    assert Values(line, environment)["kv-transfer-config"] == merged
    assert Values(line, environment).with_given({})["kv-transfer-config"] == merged
    replaced, _ = parsed_flags.from_command_line(["--kv-transfer-config", '{"kv_role": "kv_both"}'])
    assert Values(replaced, environment)["kv-transfer-config"] == {"kv_role": "kv_both"}, "a whole object replaces it"
    assert environment["kv-transfer-config"].value == msgspec.json.decode(text), "sources stay as they are"


def test_a_key_without_a_value() -> None:
    with pytest.raises(ConfigError, match=r"^--kv-transfer-config.kv_role: expects a value$"):
        parsed_flags.from_command_line(["--kv-transfer-config.kv_role", "--port", "1"])
    with pytest.raises(ConfigError, match=r"^--port.kv_role: no such flag"):
        parsed_flags.from_command_line(["--port.kv_role", "1"])


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("drop=0.01,delay=50ms,flip=0.001", KVTransferFaults(drop=0.01, delay_ms=50.0, flip=0.001)),
        ("drop=1", KVTransferFaults(drop=1.0)),
        ("delay=2.5", KVTransferFaults(delay_ms=2.5)),
    ],
)
def test_faults(text: str, faults: KVTransferFaults) -> None:
    assert config({}, "--pd-faults", text).faults == faults
    assert config({}).faults == KVTransferFaults()


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("loss=1", "--pd-faults loss=1: expected drop=0.01,delay=50ms,flip=0.001 or a part of it"),
        ("drop=x", "--pd-faults drop=x: expected drop=0.01,delay=50ms,flip=0.001 or a part of it"),
        ("drop=2", "--pd-faults drop=2: drop and flip are probabilities from 0 to 1, delay is not negative"),
        ("delay=-1ms", "--pd-faults delay=-1ms: drop and flip are probabilities from 0 to 1, delay is not negative"),
    ],
)
def test_faults_that_cannot_be(text: str, line: str) -> None:
    assert refusal(values({"kv_role": "kv_both"}, "--pd-faults", text)) == line


def test_faults_need_transfers() -> None:
    assert refusal(values(None, "--pd-faults", "drop=1")) == (
        "--pd-faults: this worker has no KV transfers; give it a role"
    )
