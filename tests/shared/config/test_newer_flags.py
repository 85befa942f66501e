"""Flags of newer command lines that several settings follow from, or that stand for another flag."""

import json
from pathlib import Path

import pytest

from blockyard.shared.config import host_memory, parsed_flags, resolve, worker_fields
from blockyard.shared.config.checkpoint import Checkpoint
from blockyard.shared.config.parsed_flags import Values
from blockyard.shared.config.resolve import Deployment
from blockyard.shared.config.services.process import BusConfig
from blockyard.shared.config.services.worker import WorkerConfig
from blockyard.shared.errors import ConfigError
from blockyard.shared.messages import ToolDefaults

BUS = BusConfig(registry="ipc:///run/x/message-bus", bind="ipc:///run/x")
CONFIG = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 4096, "vocab_size": 4096}
GPU = ("--device", "cuda")


def values_of(*args: str) -> Values:
    return Values(parsed_flags.from_command_line(args)[0])


def deploy(*args: str) -> Deployment:
    model = Checkpoint(name="org/m", path=Path("/m"), tokenizer_path=Path("/t"), config=CONFIG)
    return resolve.resolve(values_of(*args), model, BUS)


def worker(*args: str) -> WorkerConfig:
    return deploy(*args).workers[0]


@pytest.mark.parametrize(
    ("args", "eager", "fused"),
    [
        (("--optimization-level", "0"), True, False),
        (("--optimization-level", "O1"), False, False),
        (("--optimization-level=O2",), False, True),
        (("--optimization-level", "3", "-cc", '{"use_cudagraph": false}'), True, True),
        (("-O1",), False, False),
    ],
)
def test_an_optimization_level_is_one_of_compilation(args: tuple[str, ...], eager: bool, fused: bool) -> None:
    config = worker(*args)
    assert (config.enforce_eager, config.fused_steps) == (eager, fused)


def test_two_levels_that_disagree_are_refused() -> None:
    with pytest.raises(ConfigError, match="--optimization-level O3 and --compilation-config 1 disagree"):
        deploy("--optimization-level", "O3", "--compilation-config", "1")


@pytest.mark.parametrize(
    ("args", "sizes"),
    [
        ((), []),
        (("--cudagraph-capture-sizes", "4", "1", "16", "4"), [1, 4, 16]),
        (("--cudagraph-capture-sizes", "[1, 2, 8]"), [1, 2, 8]),
        (("--cudagraph-capture-sizes", "1,2,8", "--max-cudagraph-capture-size", "4"), [1, 2]),
        (("--max-cudagraph-capture-size", "40"), [1, 2, 4, 8, 16, 32, 40]),
        (("--max-cudagraph-capture-size", "500", "--max-num-seqs", "3"), [1, 2, 3]),
        (("-cc", '{"cudagraph_capture_sizes": [2, 6]}', "--max-cudagraph-capture-size", "6"), [2, 6]),
        (("--performance-mode", "interactivity", "--max-num-seqs", "6"), [1, 2, 3, 4, 5, 6]),
        (("--performance-mode", "interactivity", "--cudagraph-capture-sizes", "5"), [5]),
    ],
)
def test_sizes_of_cuda_graphs(args: tuple[str, ...], sizes: list[int]) -> None:
    assert worker(*args).graph_sizes == sizes


def test_interactivity_captures_each_small_size_and_the_usual_large_ones() -> None:
    sizes = worker("--performance-mode", "interactivity", "--max-num-seqs", "256").graph_sizes
    assert sizes[:33] == [*range(1, 33), 48] and sizes[-2:] == [224, 256]


@pytest.mark.parametrize(
    "args",
    [
        ("--cudagraph-capture-sizes", "8", "--max-cudagraph-capture-size", "4"),
        ("--cudagraph-capture-sizes", "8", "-cc", '{"cudagraph_capture_sizes": [4]}'),
        ("--cudagraph-capture-sizes", "two"),
        ("--cudagraph-capture-sizes", "[1, true]"),
        ("--cudagraph-capture-sizes", "4", "0"),
    ],
)
def test_sizes_that_cannot_be_are_refused(args: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="cudagraph-capture-size"):
        deploy(*args)


def test_throughput_doubles_what_is_not_given() -> None:
    for device in ((), GPU):
        plain, fast = (values_of(*device, *args) for args in ((), ("--performance-mode", "throughput")))
        assert worker_fields.num_seqs(fast) == 2 * worker_fields.num_seqs(plain)
    model = Checkpoint(name="m", path=Path("/m"), tokenizer_path=Path("/t"), config=CONFIG)
    assert resolve.step_tokens(values_of("--max-num-seqs", "8"), model) == 512
    assert resolve.step_tokens(values_of("--max-num-seqs", "8", "--performance-mode", "throughput"), model) == 1024
    given = ("--max-num-seqs", "9", "--max-num-batched-tokens", "99", "--performance-mode", "throughput")
    assert (worker(*given).max_num_seqs, worker(*given).max_num_batched_tokens) == (9, 99)


@pytest.mark.parametrize(
    ("args", "seqs", "tokens"),
    [
        (("--max-num-active-seqs", "5"), 5, 512),
        (("--max-num-active-seqs", "50", "--max-num-seqs", "20"), 20, 512),
        (("--max-num-scheduled-tokens", "1k"), 256, 1000),
        (("--max-num-scheduled-tokens", "300", "--max-num-batched-tokens", "400"), 256, 300),
    ],
)
def test_the_lower_of_two_limits_counts(args: tuple[str, ...], seqs: int, tokens: int) -> None:
    ring = deploy("--device", "cpu", *args)
    assert (ring.workers[0].max_num_seqs, ring.workers[0].max_num_batched_tokens) == (seqs, tokens)
    assert (ring.scheduler.max_num_seqs, ring.scheduler.max_num_batched_tokens) == (seqs, tokens)


def test_a_limit_of_tokens_below_the_sequences_is_refused_by_its_name() -> None:
    with pytest.raises(ConfigError, match="--max-num-scheduled-tokens 9: at least --max-num-seqs, 20, is needed"):
        deploy("--max-num-scheduled-tokens", "9", "--max-num-seqs", "20")


def test_host_memory_by_the_other_name() -> None:
    assert host_memory.swap_space(values_of("--kv-offloading-size", "1.5")) == 1.5
    assert host_memory.swap_space(values_of("--kv-offloading-size", "2", "--swap-space", "2")) == 2
    with pytest.raises(ConfigError, match="--kv-offloading-size 1 and --swap-space 2 disagree"):
        host_memory.swap_space(values_of("--kv-offloading-size", "1", "--swap-space", "2"))


def test_tokenizers_by_each_name() -> None:
    for name in ("tokenizers", "tokenizer-pool-size", "renderer-num-workers"):
        assert len(deploy(f"--{name}", "3").tokenizers) == 3
    with pytest.raises(ConfigError, match="--tokenizers 2 and --renderer-num-workers 3 disagree"):
        deploy("--tokenizers", "2", "--renderer-num-workers", "3")


def test_memory_by_the_other_name() -> None:
    assert worker("--device-memory-utilization", "0.5").gpu_memory_utilization == 0.5


def tools(*args: str) -> ToolDefaults:
    return deploy(*args).scheduler.model.tools


def test_marks_of_reasoning_replace_those_of_the_parser() -> None:
    marks = ("--reasoning-config", '{"reasoning_start_str": "<t>", "reasoning_end_str": "Enough.</t>"}')
    alone, beside = tools(*marks), tools(*marks, "--reasoning-parser", "qwen3")
    assert (alone.reasoning_parser, alone.reasoning_start, alone.reasoning_end) == ("", "<t>", "Enough.</t>")
    assert (beside.reasoning_parser, beside.reasoning_start, beside.reasoning_end) == ("qwen3", "<t>", "Enough.</t>")
    assert tools("--reasoning-config.reasoning_parser", "qwen3") == tools("--reasoning-parser", "qwen3")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--reasoning-config", '{"reasoning_start_str": "<t>"}'), "reasoning_start_str needs reasoning_end_str"),
        (("--reasoning-config", '{"end": "<t>"}'), "unknown field `end`"),
        (
            ("--reasoning-config.reasoning_parser", "qwen3", "--reasoning-parser", "deepseek_r1"),
            "reasoning_parser qwen3 and --reasoning-parser deepseek_r1 disagree",
        ),
    ],
)
def test_marks_that_cannot_be_are_refused(args: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        deploy(*args)


def test_other_log_probabilities_are_sampled_on_the_host() -> None:
    assert worker().run_ahead_penalties
    assert not worker("--logprobs-mode", "processed_logits").run_ahead_penalties


def test_blocks_of_another_config_have_other_hashes() -> None:
    assert deploy("--hf-config-path", "other").scheduler.block_scope != deploy().scheduler.block_scope
    assert deploy("--hf-config-path", "other").tokenizers[0].block_scope.endswith("|other")


def test_one_gateway_is_what_a_frontend_in_one_process_stands_for() -> None:
    ring = deploy("--disable-frontend-multiprocessing")
    assert len(ring.gateways) == 1
    assert any("--disable-frontend-multiprocessing: the same as --api-gateways 1" in note for note in ring.notes)
    with pytest.raises(ConfigError, match="--api-gateways: --disable-frontend-multiprocessing is one gateway"):
        deploy("--disable-frontend-multiprocessing", "--api-gateways", "2")


def test_the_files_of_a_log_have_two_names(tmp_path: Path) -> None:
    file = tmp_path / "log.json"
    file.write_text('{"version": 1}')
    keys = json.dumps({"level": "DEBUG", "pylogging_config_file": str(file)})
    for args in (("--log-config-file", str(file), "--log-level", "debug"), ("--logging-config", keys)):
        ring = deploy(*args)
        for config in (ring.registry, *ring.gateways, ring.scheduler, *ring.workers):
            assert (config.process.log_config_file, config.process.log_level) == (str(file), "debug")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--log-config-file", "/none"), "cannot read /none"),
        (("--log-config-file", __file__), "is not a JSON object"),
        (("--logging-config", '{"handlers": 1}'), "unknown field `handlers`"),
        (("--logging-config.level", "debug", "--log-level", "error"), "disagree about level"),
        (("--disable-access-log-for-endpoints", "health"), "a path begins with /, got 'health'"),
        (("--ssl-ciphers", "HIGH"), "--ssl-ciphers: needs --ssl-certfile"),
        (("--enable-ssl-refresh",), "--enable-ssl-refresh: needs --ssl-certfile"),
    ],
)
def test_settings_of_the_server_that_cannot_be(args: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        deploy(*args)


def test_notes_of_flags_without_effect() -> None:
    notes = deploy("--no-enable-log-deltas", "--max-log-len", "9").notes
    assert [note.partition(":")[2] for note in notes if "has no effect" in note] == [
        " has no effect without --enable-log-outputs",
        " has no effect without --enable-log-requests or --enable-log-outputs",
    ]
    beside = deploy("--no-enable-log-deltas", "--max-log-len", "9", "--enable-log-outputs").notes
    assert not any("has no effect" in note for note in beside)


def test_paths_without_a_line() -> None:
    config = deploy("--disable-access-log-for-endpoints", "/ping, /tokenize").gateways[0]
    assert config.unlogged_paths == ["/ping", "/tokenize"]
