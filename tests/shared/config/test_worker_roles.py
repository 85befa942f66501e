"""--prefill-workers and --decode-workers, --role, and the flags of one role."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from blockyard.shared.config import host_memory, parsed_flags, resolve, worker_roles
from blockyard.shared.config.checkpoint import Checkpoint
from blockyard.shared.config.flags import FLAGS
from blockyard.shared.config.flags.roles import PER_ROLE
from blockyard.shared.config.parsed_flags import Values
from blockyard.shared.config.resolve import Deployment
from blockyard.shared.config.services.process import BusConfig, ProcessConfig
from blockyard.shared.config.services.worker import WorkerConfig
from blockyard.shared.errors import ConfigError
from blockyard.shared.messages import KVRole

BUS = BusConfig(registry="ipc:///run/x/message-bus", bind="ipc:///run/x")
PROCESS = ProcessConfig(name="w", bus=BUS)
CONFIG = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 4096, "vocab_size": 4096}
MODEL = Checkpoint(name="org/m", path=Path("/m"), tokenizer_path=Path("/t"), config=CONFIG)
APART = ("--prefill-workers", "1", "--decode-workers", "1")


def values(*args: str) -> Values:
    return Values(parsed_flags.from_command_line(["--device", "cpu", *args])[0])


def deploy(*args: str) -> Deployment:
    return resolve.resolve(values(*args), MODEL, BUS)


def of_process(*args: str) -> WorkerConfig:
    return resolve.worker(worker_roles.of_process(values(*args)), MODEL, PROCESS)


def role(config: WorkerConfig) -> KVRole | None:
    return config.kv_transfer.role if config.kv_transfer is not None else None


def test_without_roles_there_are_no_transfers() -> None:
    for args in ((), ("--data-parallel-size", "2")):
        assert {role(config) for config in deploy(*args).workers} == {None}
    assert of_process().kv_transfer is None


@pytest.mark.parametrize(
    ("args", "names"),
    [
        (APART, ["prefill 0", "decode 0"]),
        (("--prefill-workers", "2", "--decode-workers", "1"), ["prefill 0", "prefill 1", "decode 0"]),
        ((*APART, "--data-parallel-size", "2"), ["0", "1", "prefill 0", "decode 0"]),
        ((*APART, "--data-parallel-size", "1"), ["0", "prefill 0", "decode 0"]),
        (("--prefill-workers", "2"), ["prefill 0", "prefill 1"]),
        ((*APART, "--decode.data-parallel-size", "2"), ["prefill 0", "decode 0", "decode 1"]),
        ((*APART, "--kv-transfer-config.kv_role", "kv_both"), ["prefill 0", "decode 0"]),
    ],
)
def test_each_worker_is_a_group_of_its_own(args: tuple[str, ...], names: list[str]) -> None:
    found = deploy(*args).workers
    assert [config.process.name for config in found] == [f"gpu_worker {name}" for name in names]
    assert {config.replicas for config in found} == {len(names)}
    assert [role(config) for config in found] == [
        KVRole(name.partition(" ")[0]) if " " in name else KVRole.BOTH for name in names
    ]


def test_each_worker_has_a_gpu_of_its_own() -> None:
    found = deploy(*APART, "--data-parallel-size", "1", "--device", "cuda").workers
    assert [config.gpu for config in found] == [0, 1, 2]


def test_one_worker_of_a_role_has_no_number() -> None:
    (one,) = deploy("--decode-workers", "1").workers
    assert (one.process.name, role(one), one.gpu) == ("gpu_worker decode", KVRole.DECODE, None)


def test_the_role_of_all_workers() -> None:
    found = deploy("--data-parallel-size", "2", "--kv-transfer-config", '{"kv_role": "kv_producer"}').workers
    assert [role(config) for config in found] == [KVRole.PREFILL, KVRole.PREFILL]
    assert role(of_process("--role", "decode")) is KVRole.DECODE
    assert role(of_process("--role", "both")) is KVRole.BOTH
    assert role(of_process("--kv-transfer-config.kv_role", "kv_consumer")) is KVRole.DECODE


def test_the_number_of_workers_says_their_roles_alone() -> None:
    with pytest.raises(ConfigError) as error:
        deploy(*APART, "--kv-transfer-config.kv_role", "kv_producer")
    assert str(error.value) == (
        "--kv-transfer-config: kv_role kv_producer: --prefill-workers and --decode-workers give the roles; use kv_both"
    )


def own_value(name: str) -> tuple[str, Any]:
    """Returns a value of the flag for one role, as the command line has it and as it is read."""
    if name == "compilation-config":
        return "0", "0"
    flag = FLAGS[name]
    if flag.le == 1:
        return "0.5", 0.5
    number = 700 if name == "max-num-batched-tokens" else 3
    return str(number), number


@pytest.mark.parametrize("own", ["prefill", "decode"])
@pytest.mark.parametrize("name", PER_ROLE)
def test_a_flag_of_one_role_is_the_same_flag_for_its_workers(name: str, own: str) -> None:
    text, _ = own_value(name)
    plain = {str(role(config)): config for config in deploy(*APART).workers}
    with_all = {str(role(config)): config for config in deploy(*APART, f"--{name}", text).workers}
    with_own = {str(role(config)): config for config in deploy(*APART, f"--{own}.{name}", text).workers}
    other = "decode" if own == "prefill" else "prefill"
    assert with_own[own] == with_all[own] != plain[own]
    assert with_own[other] == plain[other]
    with_more = deploy(*APART, "--data-parallel-size", "1", f"--{own}.{name}", text).workers
    assert with_more[0] == deploy(*APART, "--data-parallel-size", "1").workers[0], "the role both has no own flags"


@pytest.mark.parametrize("own", ["prefill", "decode"])
@pytest.mark.parametrize("name", PER_ROLE)
def test_a_process_has_the_flags_of_its_role(name: str, own: str) -> None:
    words = (f"--{own}.{name}", own_value(name)[0])
    assert of_process("--role", own, *words) == of_process("--role", own, f"--{name}", words[1])
    other = "decode" if own == "prefill" else "prefill"
    assert of_process("--role", other, *words) == of_process("--role", other)


def test_a_flag_of_one_role_goes_before_the_flag_of_all() -> None:
    found = deploy(*APART, "--max-num-seqs", "40", "--decode.max-num-seqs", "90").workers
    assert [config.max_num_seqs for config in found] == [40, 90]


def test_notes_name_the_flag_of_the_role() -> None:
    limit = ("--kv-cache-memory-bytes", "1g")
    reason = "has no effect beside --kv-cache-memory-bytes"
    of_decode = deploy(*APART, *limit, "--decode.gpu-memory-utilization", "0.5").notes
    assert of_decode == [f"--decode.gpu-memory-utilization: {reason}"]
    of_all = deploy(*APART, *limit, "--gpu-memory-utilization", "0.5", "--decode.swap-space", "0.1").notes
    assert of_all == [f"--gpu-memory-utilization: {reason}"], "said once"


def test_the_scheduler_has_the_limits_of_the_largest_worker() -> None:
    limits = ("--prefill.max-num-batched-tokens", "8k", "--prefill.max-num-seqs", "8", "--decode.max-num-seqs", "64")
    ring = deploy(*APART, *limits)
    assert [config.max_num_batched_tokens for config in ring.workers] == [8000, 512]
    assert (ring.scheduler.max_num_batched_tokens, ring.scheduler.max_num_seqs) == (8000, 64)
    alone = resolve.scheduler(values(*limits), MODEL, PROCESS)
    assert (alone.max_num_batched_tokens, alone.max_num_seqs) == (8000, 256), "of workers that it does not know yet"


def test_names_in_the_environment_and_in_python() -> None:
    given, _ = parsed_flags.from_environment({"BLOCKYARD_DECODE_MAX_NUM_SEQS": "9"})
    assert given["decode.max-num-seqs"].value == 9
    assert parsed_flags.from_mapping({"decode_max_num_seqs": 9}, "LLM")["decode.max-num-seqs"].value == 9
    assert parsed_flags.from_mapping({"decode.max_num_seqs": 9}, "c.yaml")["decode.max-num-seqs"].value == 9


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (
            ("--prefill.max-num-seqs", "8"),
            "--prefill.max-num-seqs: there are no prefill workers; give --prefill-workers",
        ),
        (
            ("--decode-data-parallel-size", "2"),
            "--decode-data-parallel-size: there are no decode workers; give --decode-workers",
        ),
        (
            (*APART, "--decode.max-num-batched-tokens", "64"),
            "--decode.max-num-batched-tokens 64: at least --max-num-seqs, 256, is needed",
        ),
        (
            (*APART, "--decode.max-num-batched-tokens", "64", "--decode.max-num-seqs", "65"),
            "--decode.max-num-batched-tokens 64: at least --decode.max-num-seqs, 65, is needed",
        ),
        (
            (*APART, "--no-enable-chunked-prefill", "--decode.max-num-batched-tokens", "512"),
            "--decode.max-num-batched-tokens 512: without chunked prefill a step must hold the longest prompt, 4096 "
            "tokens",
        ),
        (
            (*APART, "--device", "cuda", "--kv-cache-dtype", "fp8", "--calculate-kv-scales"),
            "--calculate-kv-scales: workers exchange KV blocks only with equal scales, and each would calculate its "
            "own; give --quantization-param-path",
        ),
        (("--decode-workers", "-1"), "--decode-workers: must be at least 0, got -1"),
        (
            (*APART, "--decode.gpu-memory-utilization", "2"),
            "--decode.gpu-memory-utilization: must be at most 1, got 2.0",
        ),
    ],
)
def test_what_cannot_be_is_one_line(args: tuple[str, ...], line: str) -> None:
    with pytest.raises(ConfigError) as error:
        deploy(*args)
    assert str(error.value) == line


MIXTURE = msgspec.structs.replace(MODEL, config={"architectures": ["MixtralForCausalLM"], "num_local_experts": 6})
REPLICA = ("-dp", "2", "--data-parallel-rank", "1", "--enable-expert-parallel")


def test_a_replica_of_several_processes() -> None:
    apart = {"expert_replicas": 2, "replica": 1, "replicas_apart": True, "rank_group": "gpu_worker"}
    assert worker_roles.of_replica(values(*REPLICA), MIXTURE, BUS) == apart
    assert worker_roles.of_replica(values(*REPLICA, "--name", "left"), MIXTURE, BUS)["rank_group"] == "left"
    assert worker_roles.of_replica(values(*REPLICA), MODEL, BUS) == {}, "it has no experts"
    assert worker_roles.of_replica(values(), MIXTURE, BUS) == {}


@pytest.mark.parametrize(
    ("args", "bind", "said"),
    [
        (("-dpn", "2"), "tcp://10.0.0.7", "-dpn 2: replicas of -dp 2 have numbers below 2"),
        (("--no-enable-expert-parallel",), "tcp://10.0.0.7", "is for replicas with --enable-expert-parallel"),
        (("--nnodes", "2"), "tcp://10.0.0.7", "not built with --nnodes: the ranks of a replica are on one host"),
        ((), "tcp://0.0.0.0", "--bind tcp://ADDRESS is needed"),
        (("-tp", "4"), "tcp://10.0.0.7", "6 experts cannot be on 8 ranks"),
    ],
)
def test_replicas_of_several_processes_that_cannot_be(args: tuple[str, ...], bind: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        worker_roles.of_replica(values(*REPLICA, *args), MIXTURE, msgspec.structs.replace(BUS, bind=bind))


@pytest.mark.parametrize("name", ["model", "dtype", "block-size", "kv-cache-dtype", "port", "tp"])
def test_a_flag_that_is_the_same_for_all_workers(name: str) -> None:
    with pytest.raises(ConfigError) as error:
        values(f"--prefill.{name}", "1")
    assert str(error.value) == (
        f"--prefill.{name}: is no setting of one role, give --{name}; a role may have its own {', '.join(PER_ROLE)}"
    )
    with pytest.raises(ConfigError, match="BLOCKYARD_DECODE_DTYPE: is no setting of one role, give --dtype"):
        parsed_flags.from_environment({"BLOCKYARD_DECODE_DTYPE": "half"})
    with pytest.raises(ConfigError, match="LLM: decode_dtype: is no setting of one role, give --dtype"):
        parsed_flags.from_mapping({"decode_dtype": "half"}, "LLM")


def test_a_role_flag_with_a_typing_error() -> None:
    with pytest.raises(
        ConfigError, match=r"--prefill.max-num-seq: no such flag; did you mean --prefill.max-num-seqs\?"
    ):
        values("--prefill.max-num-seq", "1")


def test_workers_of_all_roles_share_the_memory() -> None:
    to_start = worker_roles.workers_to_start(values(*APART, "--swap-space", "2", "--decode.swap-space", "5"))
    kinds = [(each.values, each.num_workers) for each in to_start]
    host_memory.check(kinds, there_is=7 << 30)
    with pytest.raises(ConfigError) as error:
        host_memory.check(kinds, there_is=6 << 30)
    assert str(error.value) == (
        "--decode.swap-space 5 for each of 1 workers and those of other roles: there are 6.0 GiB of memory on this "
        "machine"
    )
