"""From flags to every service's settings."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from blockyard.shared.config import host_memory, parsed_flags, resolve
from blockyard.shared.config.checkpoint import Checkpoint
from blockyard.shared.config.resolve import Deployment
from blockyard.shared.config.services.process import BusConfig
from blockyard.shared.config.services.worker import ExpertBalance
from blockyard.shared.errors import ConfigError
from blockyard.shared.messages import KVRole, SamplingDefaults

BUS = BusConfig(registry="ipc:///run/x/message-bus", bind="ipc:///run/x")
LINEAR = '{"rope_type": "linear", "factor": 2}'
CONFIG = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 4096, "vocab_size": 4096}


def deploy(
    *args: str, config: dict[str, object] | None = None, generation: dict[str, object] | None = None
) -> Deployment:
    values = parsed_flags.Values(parsed_flags.from_command_line(args)[0])
    model = Checkpoint(
        name="org/m",
        path=Path("/m"),
        tokenizer_path=Path("/t"),
        config=CONFIG | (config or {}),
        generation=generation or {},
    )
    return resolve.resolve(values, model, BUS)


def test_the_default_ring() -> None:
    ring = deploy("--model", "org/m", "--device", "cpu")
    assert [len(part) for part in (ring.gateways, ring.tokenizers, ring.detokenizers, ring.workers)] == [1, 1, 1, 1]
    assert ring.scheduler.served_model_names == ["org/m"]
    assert (ring.scheduler.depth, ring.scheduler.max_num_seqs, ring.scheduler.max_num_batched_tokens) == (
        None,
        256,
        512,
    )
    assert ring.workers[0].max_num_batched_tokens == 512
    assert ring.workers[0].max_model_len is None
    assert ring.scheduler.model.defaults == SamplingDefaults()
    assert ring.gateways[0].tls is None
    assert ring.notes == []


def test_every_struct_survives_its_settings_file() -> None:
    ring = deploy("--api-gateways", "2", "--allowed-origins", "https://a.example")
    for config in (ring.registry, *ring.gateways, *ring.tokenizers, *ring.detokenizers, ring.scheduler, *ring.workers):
        assert msgspec.json.decode(msgspec.json.encode(config), type=type(config)) == config


def test_replicas_are_told_apart_by_name_and_metrics_port() -> None:
    ring = deploy("--api-gateways", "3", "--tokenizers", "2", "--detokenizers", "2", "--metrics-port", "9100")
    assert [g.process.name for g in ring.gateways] == ["api_gateway 0", "api_gateway 1", "api_gateway 2"]
    assert [g.metrics_port for g in ring.gateways] == [9100, 9101, 9102]
    assert {g.port for g in ring.gateways} == {8000}
    assert [t.process.name for t in ring.tokenizers] == ["tokenizer_pool 0", "tokenizer_pool 1"]
    assert [d.process.name for d in ring.detokenizers] == ["detokenizer 0", "detokenizer 1"]


def test_each_replica_of_the_model_is_a_worker() -> None:
    (one,) = deploy("--device", "cpu").workers
    assert (one.process.name, one.replicas, one.gpu) == ("gpu_worker", 1, None)
    on_cpu = deploy("--device", "cpu", "--data-parallel-size", "3").workers
    assert [w.process.name for w in on_cpu] == ["gpu_worker 0", "gpu_worker 1", "gpu_worker 2"]
    assert [(w.replicas, w.gpu) for w in on_cpu] == [(3, None)] * 3
    assert [w.gpu for w in deploy("--device", "cuda", "-dp", "2").workers] == [0, 1]
    assert [w.gpu for w in deploy("--device", "cuda", "-dp", "2", "--worker-cls", "mock").workers] == [None, None]


def test_ranks_have_gpus_of_their_own() -> None:
    """A worker's number is that of its first GPU."""
    assert [
        (w.replicas, w.tensor_parallel_size) for w in deploy("--device", "cpu", "-dp", "3", "-tp", "2").workers
    ] == [(3, 2)] * 3
    on_gpus = deploy("--device", "cuda", "-dp", "2", "-tp", "3").workers
    assert [(w.replicas, w.gpu) for w in on_gpus] == [(2, 0), (2, 3)]
    [pools] = deploy("--device", "cpu", "-pp", "2", "--task", "embed").workers
    assert (pools.task, pools.pipeline_parallel_size) == ("embed", 2)
    assert [w.gpu for w in deploy("--device", "cuda", "-tp", "2").workers] == [0]
    mock = ("--device", "cuda", "--worker-cls", "mock", "-tp", "2")
    assert [w.gpu for w in deploy(*mock, "-dp", "2").workers] == [None, None]


def test_ranks_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="-tp 9 is more than the 8 query heads of a layer"):
        deploy("--device", "cpu", "-tp", "9", config={"num_attention_heads": 8})


def test_roles_may_have_unlike_numbers_of_ranks() -> None:
    roles = ("--prefill-workers", "1", "--decode-workers", "1")
    found = deploy("--device", "cpu", *roles, "--prefill.tensor-parallel-size", "2").workers
    assert [(one.kv_transfer.role, one.tensor_parallel_size) for one in found if one.kv_transfer] == [
        (KVRole.PREFILL, 2),
        (KVRole.DECODE, 1),
    ]
    with pytest.raises(ConfigError, match="-tp 9 is more than the 8 query heads of a layer"):
        deploy("--device", "cpu", *roles, "-tp", "9", config={"num_attention_heads": 8})
    found = deploy("--device", "cuda", *roles, "--decode.tensor-parallel-size", "2", "-tp", "3").workers
    assert [one.gpu for one in found] == [0, 3], "the first GPU of each worker"
    stages = ("--prefill.pipeline-parallel-size", "3", "--prefill.pipeline-layers", "20,6,6", "-tp", "2")
    found = deploy("--device", "cuda", *roles, *stages).workers
    assert [(one.num_ranks, one.pipeline_layers, one.gpu) for one in found] == [(6, [20, 6, 6], 0), (2, [], 6)]


def test_stages_have_ranks_and_gpus_of_their_own() -> None:
    [one] = deploy("--device", "cuda", "-tp", "2", "-pp", "2", "--pipeline-layers", "20,12").workers
    assert (one.num_ranks, one.pipeline_parallel_size, one.pipeline_layers, one.gpu) == (4, 2, [20, 12], 0)
    on_gpus = deploy("--device", "cuda", "-dp", "2", "-pp", "3").workers
    assert [(w.replicas, w.gpu) for w in on_gpus] == [(2, 0), (2, 3)]


@pytest.mark.parametrize(
    ("flags", "config", "said"),
    [
        (["-pp", "5"], {"num_hidden_layers": 4}, "-pp 5 is more than the 4 layers of the model"),
        (["-pp", "5"], {"text_config": {"num_hidden_layers": 4}}, "-pp 5 is more than the 4 layers of the model"),
        (["-pp", "2", "--model-impl", "transformers"], {}, "-pp 2: not built for models that run by their class"),
        (["-pp", "2"], {"architectures": ["BambaForCausalLM"]}, "-pp 2: not built for models that run by their class"),
        (["-pp", "2", "--distributed-executor-backend", "uni"], {}, "uni is for one rank; -pp 2 needs mp"),
        (["--pipeline-layers", "3,1"], {}, "--pipeline-layers 3,1: .* each of 1 pipeline stages"),
        (["-pp", "2", "--pipeline-layers", "3,2"], {"num_hidden_layers": 4}, "3,2: these are 5 layers, .* has 4"),
        (["-pp", "2", "--pipeline-layers", "4,0"], {}, "--pipeline-layers 4,0: .* each of 2 pipeline stages"),
    ],
)
def test_layouts_that_cannot_be_are_refused(flags: list[str], config: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        deploy("--device", "cpu", *flags, config=config)


def test_experts_are_spread_over_the_ranks_of_a_worker() -> None:
    [spread] = deploy("--device", "cpu", "-tp", "2", "--enable-expert-parallel").workers
    assert (spread.expert_parallel, spread.expert_replicas) == (True, 1)


MIXTURE = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 6}
SPREAD = ("--device", "cpu", "-dp", "2", "--enable-expert-parallel")


def test_experts_are_spread_over_replicas() -> None:
    made = deploy(*SPREAD, "-tp", "2", config=MIXTURE).workers
    assert [(one.replica, one.expert_replicas, one.replicas) for one in made] == [(0, 2, 2), (1, 2, 2)]
    for flags, config in ((SPREAD, {}), ((*SPREAD, "--worker-cls", "mock"), MIXTURE), (SPREAD[:4], MIXTURE)):
        assert [one.expert_replicas for one in deploy(*flags, config=config).workers] == [1, 1]  # each has all
    of_role = ("--decode.data-parallel-size", "3", "--prefill-workers", "2", "--decode-workers", "1")
    made = deploy(*SPREAD, *of_role, config=MIXTURE).workers
    together = [(one.expert_replicas, one.replica, one.replica_group) for one in made]
    assert together == [(2, 0, 0), (2, 1, 0), (1, 0, 2), (1, 0, 3), (3, 0, 4), (3, 1, 4), (3, 2, 4)]
    assert all(
        one.lora and one.expert_replicas == 2 for one in deploy(*SPREAD, "--enable-lora", config=MIXTURE).workers
    )


@pytest.mark.parametrize(
    ("flags", "config", "said"),
    [
        (["-tp", "4"], MIXTURE, "6 experts cannot be on 8 ranks"),
        (["--model-impl", "transformers"], MIXTURE, "by their class in transformers"),
        ([], MIXTURE | {"architectures": ["BambaForCausalLM"]}, "by their class in transformers"),
    ],
)
def test_replicas_that_cannot_have_experts_together_are_refused(
    flags: list[str], config: dict[str, object], said: str
) -> None:
    with pytest.raises(ConfigError, match=f"--enable-expert-parallel with -dp 2: .*{said}"):
        deploy(*SPREAD, *flags, config=config)


def test_experts_move_by_their_loads() -> None:
    flags = ["--device", "cpu", "-tp", "2", "--enable-expert-parallel"]
    assert deploy(*flags).workers[0].expert_balance is None
    found = deploy(*flags, "--enable-eplb")
    assert found.workers[0].expert_balance == ExpertBalance(interval_steps=3000, window_steps=1000)
    asked = '{"step_interval": 50, "window_size": 80, "log_balancedness": true, "use_async": true}'
    found = deploy(*flags, "--enable-eplb", "--eplb-config", asked)
    assert found.workers[0].expert_balance == ExpertBalance(interval_steps=50, window_steps=50, logs=True)
    assert [note for note in found.notes if "eplb" in note] == [
        "--eplb-config: use_async True: has no effect, experts of one layer move between two steps"
    ]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--enable-eplb"], "--enable-eplb: needs --enable-expert-parallel"),
        (["--eplb-config", '{"step_interval": 5}'], "--eplb-config: needs --enable-eplb"),
        (["--enable-expert-parallel", "--enable-eplb", "--batch-invariant"], "--enable-eplb: not with --batch-inv"),
        (
            ["--enable-eplb", "--eplb-config", '{"interval": 5}'],
            "--eplb-config: .*interval.*; the keys are window",
        ),
        (["--enable-eplb", "--eplb-config", '{"window_size": 0}'], "--eplb-config: window_size 0: must be at least 1"),
        (["--enable-eplb", "--eplb-config", '{"num_redundant_experts": 2}'], "num_redundant_experts 2: not built yet"),
    ],
)
def test_moves_of_experts_that_cannot_be_are_refused(flags: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        deploy("--device", "cpu", "-tp", "2", *flags)


def test_uni_is_one_rank() -> None:
    assert deploy("--device", "cpu", "--distributed-executor-backend", "uni").workers[0].tensor_parallel_size == 1
    with pytest.raises(ConfigError, match="--distributed-executor-backend uni is for one rank; -tp 2 needs mp"):
        deploy("--device", "cpu", "-tp", "2", "--distributed-executor-backend", "uni")


def test_each_replica_takes_its_own_host_memory() -> None:
    flags = ["--preemption-mode", "swap", "--swap-space", "3", "--data-parallel-size", "2"]
    line, _ = parsed_flags.from_command_line(flags)
    values = parsed_flags.Values(line)
    assert host_memory.swap_space(values) == 3.0
    host_memory.check([(values, 2)], there_is=6 << 30)
    of_ranks = parsed_flags.Values(parsed_flags.from_command_line([*flags, "-tp", "2"])[0])
    with pytest.raises(ConfigError, match="--swap-space 3 for each of 4 workers"):
        host_memory.check([(of_ranks, 2)], there_is=6 << 30)
    with pytest.raises(ConfigError, match="--swap-space 3 for each of 2 workers: there are 5"):
        host_memory.check([(values, 2)], there_is=5 << 30)


def test_block_size_is_one_number_for_all() -> None:
    ring = deploy("--block-size", "32")
    assert (ring.tokenizers[0].block_size, ring.workers[0].block_size) == (32, 32)


@pytest.mark.parametrize(
    ("args", "number"),
    [
        ([], 1),
        (["--tokenizers", "3"], 3),
        (["--tokenizer-pool-size", "0"], 1),
        (["--tokenizer-pool-size", "4"], 4),
        (["--tokenizer-pool-size", "4", "--tokenizers", "4"], 4),
    ],
)
def test_tokenizers_and_the_fields_name_for_them(args: list[str], number: int) -> None:
    ring = deploy(*args)
    assert len(ring.tokenizers) == number
    assert len(ring.notes) == ("--tokenizer-pool-size" in args)


@pytest.mark.parametrize(
    ("args", "depth"),
    [
        ([], None),
        (["--run-ahead", "0"], 0),
        (["--num-scheduler-steps", "1"], None),
        (["--num-scheduler-steps", "2"], 1),
        (["--num-scheduler-steps", "8"], 7),
        (["--num-scheduler-steps", "8", "--run-ahead", "2"], 2),
        (["--disable-async-output-proc"], 0),
        (["--num-lookahead-slots", "4"], 4),
        (["--num-lookahead-slots", "4", "--num-scheduler-steps", "8"], 7),
        (["--async-scheduling"], None),
        (["--async-scheduling", "--run-ahead", "2"], 2),
        (["--no-async-scheduling"], 0),
        (["--no-async-scheduling", "--run-ahead", "0"], 0),
    ],
)
def test_run_ahead(args: list[str], depth: int | None) -> None:
    assert deploy(*args).scheduler.depth == depth


@pytest.mark.parametrize(
    ("args", "other"),
    [
        (["--async-scheduling", "--run-ahead", "0"], "--run-ahead"),
        (["--async-scheduling", "--disable-async-output-proc"], "--disable-async-output-proc"),
        (["--no-async-scheduling", "--num-scheduler-steps", "4"], "--num-scheduler-steps"),
        (["--no-async-scheduling", "--run-ahead", "1"], "--run-ahead"),
    ],
)
def test_two_flags_that_disagree_on_running_ahead(args: list[str], other: str) -> None:
    with pytest.raises(ConfigError, match=f"{args[0]} and {other}: give one of them"):
        deploy(*args)


@pytest.mark.parametrize(
    ("value", "length", "fitted"), [("4K", 4096, False), ("2k", 2000, False), ("auto", None, True), ("-1", None, True)]
)
def test_the_context_may_be_a_size_or_what_fits(value: str, length: int | None, fitted: bool) -> None:
    worker = deploy("--max-model-len", value).workers[0]
    assert (worker.max_model_len, worker.fit_max_model_len) == (length, fitted)
    worker = deploy("--max-model-len", "auto", "--disable-sliding-window", config={"sliding_window": 512}).workers[0]
    assert (worker.max_model_len, worker.fit_max_model_len) == (512, True)


@pytest.mark.parametrize(
    "extended", [["--hf-overrides", '{"max_position_embeddings": 5000}'], ["--rope-scaling", LINEAR]]
)
def test_a_context_longer_than_config_json_allows_is_refused(extended: list[str]) -> None:
    asked = ["--max-model-len", "5000"]
    with pytest.raises(ConfigError, match=r"^--max-model-len 5000 is more than the 4096 tokens config\.json allows"):
        deploy(*asked)
    assert deploy(*asked, *extended).workers[0].max_model_len == 5000
    assert deploy(*asked, "--worker-cls", "mock").workers[0].max_model_len == 5000


def test_kv_memory_in_bytes() -> None:
    ring = deploy("--kv-cache-memory-bytes", "1.5g", "--gpu-memory-utilization", "0.5")
    assert ring.workers[0].kv_cache_memory_bytes == 1_500_000_000
    assert ring.notes == ["--gpu-memory-utilization: has no effect beside --kv-cache-memory-bytes"]
    with pytest.raises(ConfigError, match="--cpu-kv-gib: --kv-cache-memory-bytes says how much already"):
        deploy("--kv-cache-memory-bytes", "1g", "--cpu-kv-gib", "1")


def test_a_unix_socket_in_place_of_a_port() -> None:
    ring = deploy("--uds", "/run/llm.sock", "--port", "9")
    assert (ring.gateways[0].uds, ring.notes) == ("/run/llm.sock", ["--port: has no effect beside --uds"])
    with pytest.raises(ConfigError, match="--api-server-count: a Unix socket has one gateway"):
        deploy("--uds", "/run/llm.sock", "--api-server-count", "2")
    with pytest.raises(ConfigError, match="longer than 107 bytes"):
        deploy("--uds", "/run/" + "x" * 200)


def test_log_levels() -> None:
    ring = deploy("--log-level", "warning", "--uvicorn-log-level", "debug")
    assert (ring.gateways[0].process.log_level, ring.scheduler.process.log_level) == ("debug", "warning")
    assert deploy("--log-level", "warning").gateways[0].process.log_level == "warning"


def test_switches_that_turn_something_off() -> None:
    ring = deploy("--disable-log-stats", "--disable-log-requests")
    assert (ring.scheduler.log_stats, ring.gateways[0].access_log) == (False, False)
    assert (deploy().scheduler.log_stats, deploy().gateways[0].access_log) == (True, True)


def test_lines_for_requests() -> None:
    def lines(*args: str) -> tuple[bool, bool]:
        gateway = deploy(*args).gateways[0]
        return gateway.access_log, gateway.log_requests

    assert lines() == lines("--no-enable-log-requests") == (True, False)
    assert lines("--enable-log-requests") == (True, True)
    assert lines("--enable-log-requests", "--disable-uvicorn-access-log") == (False, True)
    assert lines("--disable-log-requests") == lines("--disable-uvicorn-access-log") == (False, False)
    with pytest.raises(ConfigError, match="--enable-log-requests and --disable-log-requests: give one of them"):
        deploy("--enable-log-requests", "--disable-log-requests")


def overrides(*args: str, config: dict[str, object] | None = None) -> dict[str, object]:
    found = msgspec.json.decode(deploy(*args, config=config).workers[0].config_overrides)
    assert isinstance(found, dict)
    return found


def test_config_overrides() -> None:
    scaling = ("--rope-scaling", '{"rope_type": "linear", "factor": 2.0}')
    assert overrides() == {}
    assert overrides("--hf-overrides", '{"a": 1}', "--rope-theta", "5e5", *scaling) == {
        "a": 1,
        "rope_theta": 500000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    }


def test_overrides_change_the_names_of_blocks() -> None:
    plain, other = deploy(), deploy("--rope-theta", "7")
    assert plain.tokenizers[0].block_scope != other.tokenizers[0].block_scope
    for it in (plain, other):
        assert it.scheduler.block_scope == it.tokenizers[0].block_scope, "they name the blocks of one chain"


def test_prefix_caching_is_on_unless_switched_off() -> None:
    assert deploy().scheduler.enable_prefix_caching
    assert not deploy("--no-enable-prefix-caching").scheduler.enable_prefix_caching


def test_disable_sliding_window_caps_the_context() -> None:
    window: dict[str, object] = {"sliding_window": 1024}
    assert deploy("--disable-sliding-window", config=window).workers[0].max_model_len == 1024
    assert overrides("--disable-sliding-window", config=window) == {"sliding_window": 0}
    unsaid = deploy("--disable-sliding-window", config={"architectures": ["MistralForCausalLM"]})
    assert unsaid.workers[0].max_model_len == 4096
    full: dict[str, object] = {"architectures": ["MistralForCausalLM"], "sliding_window": None}
    assert deploy("--disable-sliding-window", config=full).workers[0].max_model_len is None
    off: dict[str, object] = window | {"use_sliding_window": False}
    assert deploy("--disable-sliding-window", config=off).workers[0].max_model_len is None
    with pytest.raises(ConfigError, match="--max-model-len 2048: at most the sliding window, 1024"):
        deploy("--disable-sliding-window", "--max-model-len", "2048", config=window)


def test_sampling_defaults(tmp_path: Path) -> None:
    own: dict[str, object] = {"temperature": 0.7, "top_p": 0.95, "do_sample": True, "eos_token_id": [1]}
    assert deploy(generation=own).scheduler.model.defaults == SamplingDefaults()
    assert deploy("--generation-config", "vllm", generation=own).scheduler.model.defaults == SamplingDefaults()
    auto = deploy("--generation-config", "auto", "--override-generation-config", '{"top_p": 0.5}', generation=own)
    assert auto.scheduler.model.defaults == SamplingDefaults(temperature=0.7, top_p=0.5)
    (tmp_path / "generation_config.json").write_text('{"max_new_tokens": 9}')
    folder = deploy("--generation-config", str(tmp_path), generation=own)
    assert folder.scheduler.model.defaults == SamplingDefaults(max_new_tokens=9)


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["--max-num-batched-tokens", "64"], "--max-num-batched-tokens 64: at least --max-num-seqs, 256, is needed"),
        (
            ["--no-enable-chunked-prefill", "--max-num-batched-tokens", "512"],
            "--max-num-batched-tokens 512: without chunked prefill a step must hold the longest prompt, 4096 tokens",
        ),
        (["--ssl-keyfile", "k"], "--ssl-keyfile: needs --ssl-certfile"),
        (["--ssl-keyfile", "/no/k", "--ssl-certfile", "/no/c"], "--ssl-keyfile /no/k: no such file"),
        (["--ssl-ca-certs", "x"], "--ssl-ca-certs: needs --ssl-certfile"),
        (["--chat-template", "/no/such.jinja"], "--chat-template /no/such.jinja: No such file or directory"),
        (["--tokenizers", "2", "--tokenizer-pool-size", "3"], "--tokenizers 2 and --tokenizer-pool-size 3 disagree"),
        (["--generation-config", "/no/such"], "cannot read /no/such: No such file or directory"),
        (
            ["--override-generation-config", '{"beam": 1}'],
            "--override-generation-config: 'beam' is none of temperature, top_k, top_p, min_p, repetition_penalty, "
            "max_new_tokens",
        ),
        (
            ["--override-generation-config", '{"top_p": 2}'],
            "--override-generation-config: Expected `float` <= 1.0 - at `$.top_p`",
        ),
        (
            ["--preemption-mode", "swap", "--swap-space", "0"],
            "--swap-space 0: --preemption-mode swap needs some; give it, or use recompute",
        ),
        (["--metrics-port", "65535", "--api-gateways", "2"], "--metrics-port: 65535 plus 1 gateways is beyond 65535"),
    ],
)
def test_what_does_not_fit_together_is_one_line(args: list[str], line: str) -> None:
    with pytest.raises(ConfigError) as error:
        deploy(*args)
    assert str(error.value) == line


def test_without_chunked_prefill_a_step_holds_the_longest_prompt() -> None:
    assert deploy("--no-enable-chunked-prefill").scheduler.max_num_batched_tokens == 4096


def test_a_full_batch_leaves_room_for_prompts() -> None:
    ring = deploy("--max-num-seqs", "1500")
    assert ring.scheduler.max_num_batched_tokens == ring.workers[0].max_num_batched_tokens == 3000
    asked = deploy("--max-num-seqs", "1500", "--max-num-batched-tokens", "1500")
    assert asked.scheduler.max_num_batched_tokens == 1500
    assert not asked.workers[0].fit_max_num_seqs


@pytest.mark.parametrize(
    ("flags", "seqs"),
    [
        (("--device", "cpu"), 256),
        (("--device", "cuda"), 1024),
        (("--device", "cuda", "--max-num-batched-tokens", "700"), 700),
        (("--device", "cuda", "--max-num-seqs", "9"), 9),
        (("--device", "cuda", "--worker-cls", "mock"), 256),
    ],
)
def test_a_worker_on_a_gpu_sets_its_number_of_sequences_itself(flags: tuple[str, ...], seqs: int) -> None:
    ring = deploy(*flags)
    assert ring.scheduler.max_num_seqs == ring.workers[0].max_num_seqs == seqs
    assert ring.workers[0].fit_max_num_seqs == ("--max-num-seqs" not in flags)
    assert ring.scheduler.max_num_batched_tokens >= seqs


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        ({}, 2048),
        ({"num_local_experts": 8, "num_experts_per_tok": 2}, 2048),  # Mixtral: 512 tokens an expert
        ({"num_local_experts": 32, "num_experts_per_tok": 4}, 2048),  # gpt-oss-20b: 256
        ({"num_experts": 128, "num_experts_per_tok": 8}, 4096),  # Qwen3-30B-A3B: 128
        ({"n_routed_experts": 64, "num_experts_per_tok": 6}, 4096),  # DeepSeek-V2-Lite: 192
        ({"text_config": {"num_experts": 128, "top_k_experts": 8}}, 4096),  # Gemma 4
        ({"num_experts": None, "num_experts_per_tok": 8}, 2048),
    ],
)
def test_steps_are_larger_where_an_expert_would_get_few_tokens(config: dict[str, object], tokens: int) -> None:
    ring = deploy("--device", "cuda", config=config)
    assert ring.scheduler.max_num_batched_tokens == ring.workers[0].max_num_batched_tokens == tokens
    assert deploy("--device", "cpu", config=config).scheduler.max_num_batched_tokens == 512
    asked = deploy("--device", "cuda", "--max-num-batched-tokens", "1024", config=config)
    assert asked.scheduler.max_num_batched_tokens == 1024


def test_chat_template_is_a_file_or_the_text(tmp_path: Path) -> None:
    path = tmp_path / "t.jinja"
    path.write_text("{{ messages[0].content }}")
    assert deploy("--chat-template", str(path)).tokenizers[0].chat_template == "{{ messages[0].content }}"
    assert deploy("--chat-template", "{{ 1 }}").tokenizers[0].chat_template == "{{ 1 }}"


def test_tls(tmp_path: Path) -> None:
    for name in ("k", "c"):
        (tmp_path / name).write_text("pem")
    ring = deploy("--ssl-keyfile", f"{tmp_path}/k", "--ssl-certfile", f"{tmp_path}/c", "--ssl-cert-reqs", "2")
    tls = ring.gateways[0].tls
    assert tls is not None
    assert (tls.keyfile, tls.certfile, tls.ca_certs, tls.cert_reqs) == (f"{tmp_path}/k", f"{tmp_path}/c", "", 2)
    tls = deploy("--ssl-certfile", f"{tmp_path}/c").gateways[0].tls
    assert tls is not None
    assert (tls.keyfile, tls.certfile) == ("", f"{tmp_path}/c")


def test_the_mock_worker_knows_the_models_size() -> None:
    mock = deploy("--worker-cls", "mock", "--mock-step-ms", "20").workers[0].mock
    assert (mock.vocab_size, mock.max_model_len, mock.step_ms) == (4096, 4096, 20.0)
    assert deploy("--mock-vocab-size", "7").workers[0].mock.vocab_size == 7


@pytest.mark.parametrize(
    ("args", "gib"),
    [
        ([], 0.0),
        (["--preemption-mode", "recompute"], 0.0),
        (["--preemption-mode", "swap"], 4.0),
        (["--preemption-mode", "swap", "--swap-space", "0.5"], 0.5),
        (["--swap-space", "0.5"], 0.5),
        (["--swap-space", "0"], 0.0),
        (["--swap-space", "0.5", "--preemption-mode", "recompute"], 0.0),
    ],
)
def test_host_memory_for_kv(args: list[str], gib: float) -> None:
    ring = deploy(*args)
    assert ring.workers[0].swap_space_gib == gib
    vain = "--swap-space: no host memory is taken, --preemption-mode is recompute"
    assert (vain in ring.notes) == (len(args) == 4 and not gib)


def test_more_host_memory_than_there_is_is_refused_with_what_there_is() -> None:
    with pytest.raises(ConfigError, match=r"--swap-space 1e\+06: there are [0-9.]+ GiB of memory on this machine"):
        deploy("--swap-space", "1000000")


@pytest.mark.parametrize(
    ("args", "eager", "fused", "sizes"),
    [
        ([], False, True, []),
        (["-O0"], True, False, []),
        (["-O1"], False, False, []),
        (["-O3"], False, True, []),
        (["-O", "1", "--enforce-eager"], True, False, []),
        (["-O", '{"level": 2, "cudagraph_capture_sizes": [8, 1, 8]}'], False, True, [1, 8]),
        (["-O", '{"use_cudagraph": false}'], True, True, []),
    ],
)
def test_compilation_levels(args: list[str], eager: bool, fused: bool, sizes: list[int]) -> None:
    ring = deploy(*args)
    assert (ring.workers[0].enforce_eager, ring.workers[0].graph_sizes) == (eager, sizes)
    assert ring.workers[0].fused_steps == fused
    assert sum("no torch.compile" in note for note in ring.notes) == ("-O" in "".join(args))


@pytest.mark.parametrize("value", ["4", "fast", '{"backend": "inductor"}', '{"cudagraph_capture_sizes": [0]}'])
def test_compilation_levels_that_nobody_knows(value: str) -> None:
    with pytest.raises(ConfigError, match="compilation-config"):
        deploy("--compilation-config", value)


def test_a_kv_cache_in_8_bits(tmp_path: Path) -> None:
    file = tmp_path / "scales.json"
    file.write_text("{}")
    fp8 = ("--kv-cache-dtype", "fp8")
    rings = [deploy(), deploy(*fp8), deploy(*fp8, "--calculate-kv-scales")]
    rings.append(deploy(*fp8, "--quantization-param-path", str(file)))
    workers = [ring.workers[0] for ring in rings]
    assert [w.kv_cache_dtype for w in workers] == ["auto", "fp8", "fp8", "fp8"]
    assert [(w.calculate_kv_scales, w.kv_scales_path) for w in workers[1:]] == [
        (False, None),
        (True, None),
        (False, str(file)),
    ]
    assert len({ring.scheduler.block_scope for ring in rings}) == 4, "what one stored is not what another reads"
    for args, message in (
        (("--calculate-kv-scales",), "set --kv-cache-dtype fp8"),
        (("--quantization-param-path", str(file)), "set --kv-cache-dtype fp8"),
        ((*fp8, "--calculate-kv-scales", "--quantization-param-path", str(file)), "gives them already"),
        ((*fp8, "--quantization-param-path", "/no/such"), "is not a file"),
        ((*fp8, "--device", "cpu"), "need a GPU"),
    ):
        with pytest.raises(ConfigError, match=message):
            deploy(*args)


def test_scheduling_flags_reach_the_scheduler() -> None:
    flags = ["--scheduling-policy", "fair", "--max-queue-delay", "9", "--scheduler-delay-factor", "0.5"]
    flags += ["--max-num-partial-prefills", "4", "--max-long-partial-prefills", "2"]
    made = deploy(*flags, "--long-prefill-token-threshold", "500", "--enable-sleep-mode").scheduler
    assert (made.scheduling_policy, made.max_queue_delay_s, made.delay_factor) == ("fair", 9.0, 0.5)
    assert (made.max_num_partial_prefills, made.max_long_partial_prefills) == (4, 2)
    assert (made.long_prefill_token_threshold, made.enable_sleep_mode) == (500, True)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--scheduling-policy", "lottery"], "scheduling-policy"),
        (["--preemption-mode", "prayer"], "preemption-mode"),
        (["--max-queue-delay", "60"], "--stall-timeout"),
        (["--max-queue-delay", "-1"], "max-queue-delay"),
        (["--max-num-partial-prefills", "2", "--max-long-partial-prefills", "3"], "max_long_partial_prefills"),
        (["--max-num-partial-prefills", "2", "--no-enable-chunked-prefill"], "chunked prefill"),
    ],
)
def test_scheduling_flags_that_cannot_be(args: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        deploy(*args)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--no-multi-step-stream-outputs"], "each step's tokens are always sent at once"),
        (["--num-lookahead-slots", "2"], "N is --run-ahead N"),
        (["--num-scheduler-steps", "4"], "N above 1 is --run-ahead N-1"),
        (["--disable-async-output-proc"], "the same as --run-ahead 0"),
    ],
)
def test_flags_that_say_what_happens_in_their_place(args: list[str], says: str) -> None:
    (note,) = deploy(*args).notes
    assert note.startswith(args[0]) and says in note


def test_a_step_of_an_encoder_has_texts_for_the_threads_of_a_cpu() -> None:
    ring = deploy("--device", "cpu", config={"architectures": ["BertModel"], "hidden_size": 64})
    assert ring.scheduler.max_num_batched_tokens == ring.workers[0].max_num_batched_tokens == 2048
    assert deploy("--device", "cpu", "--max-num-batched-tokens", "512").workers[0].max_num_batched_tokens == 512


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        ({"architectures": ["BertModel"], "hidden_size": 64}, 8192),
        ({"architectures": ["Qwen3Model"], "hidden_size": 1024}, 16384),
        ({"architectures": ["Qwen3Model"], "hidden_size": 4096}, 8192),
    ],
)
def test_steps_of_pooling_models_on_a_gpu(config: dict[str, Any], tokens: int) -> None:
    ring = deploy("--device", "cuda", "--task", "embed", config=config)
    assert ring.scheduler.max_num_batched_tokens == ring.workers[0].max_num_batched_tokens == tokens
    asked = deploy("--device", "cuda", "--task", "embed", "--max-num-batched-tokens", "4096", config=config)
    assert asked.workers[0].max_num_batched_tokens == 4096
