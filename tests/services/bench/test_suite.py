"""The suite's measures on a server with a mock worker, its table, and failing items."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from rig import serve as rig_serve

from blockyard.services.bench.datasets import SampleRequest
from blockyard.services.bench.load import results
from blockyard.services.bench.load.results import BenchError, RequestResult
from blockyard.services.bench.suite import adapters, command, measures, pooling, served, shapes
from blockyard.services.bench.suite.item import SuiteItem
from blockyard.services.bench.suite.items import ITEMS
from blockyard.services.bench.suite.measures import Measurement, SuiteContext
from blockyard.services.bench.suite.pooling import TextLoad
from blockyard.services.bench.suite.served import SuiteServer, WorkerCounters, random_requests
from blockyard.services.gpu_worker.lora.read_modules import AdapterLimits, read_modules
from blockyard.shared import tokenizer_files
from blockyard.shared.config import parsed_flags
from blockyard.shared.config.text_part import text_part
from blockyard.shared.errors import ConfigError

MOCK = ("--worker-cls", "mock", "--mock-step-ms", "4")


@pytest.fixture(scope="module")
def server() -> Iterator[SuiteServer]:
    with rig_serve("demo", *MOCK) as running:
        yield SuiteServer(running.url, running.launched_s)


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measures, "RUNS", 2)


def test_gaps_are_the_mock_steps(server: SuiteServer) -> None:
    found = measures.inter_token(3, 20, 30)(server)
    assert len(found.runs) == 2
    assert 3 < found.value < 30  # a step is 4 ms
    assert found.spreads["itl"].p50 == pytest.approx(found.value, rel=0.5)
    assert {*found.spreads} == {"itl", "tpot", "ttft"}


def test_a_worker_with_graphs_to_capture_is_waited_for(server: SuiteServer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert server.complete().full_s > 0  # the mock has none
    seen = iter([0.25, 0.75, 1.0])
    monkeypatch.setattr(
        served,
        "_members",
        lambda url: [served.MemberState("gpu_worker", next(seen)), served.MemberState("scheduler", 0.0)],
    )
    assert measures.launch_to_full_graphs(server.complete()).value > 0
    assert next(seen, None) is None


def test_rates_count_tokens(server: SuiteServer) -> None:
    """4 streams with a token every 4 ms each give at most 1000 tokens a second."""
    for measure in (measures.rate_while_all_run(4, 20, 40), measures.streamed_rate(4, 20, 40)):
        assert 100 < measure(server).value < 1050


def test_first_tokens(server: SuiteServer) -> None:
    for measure in (measures.first_token(50), measures.cached_first_token(64, 10)):
        found = measure(server)
        assert 2 < found.value < 1000 and len(found.runs) == 2


def test_other_lengths_than_asked_for_are_errors(server: SuiteServer) -> None:
    request = random_requests(1, 20, 5, seed=0)[0]
    with pytest.raises(BenchError, match="a request of 21 and 5 tokens was 20 and 5"):
        server.stream([SampleRequest(request.prompt, 21, 5)])
    with pytest.raises(BenchError, match="a request failed: HTTP 400"):
        server.stream([SampleRequest([10**6], 1, 5)])


def test_tokens_without_text_are_events(server: SuiteServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        results, "read", lambda x, asked: RequestResult(0, 1, tokens_s=[1.0], num_input=20, num_output=5)
    )
    with pytest.raises(BenchError, match="1 events for 5 tokens"):
        server.stream(random_requests(1, 20, 5, seed=0))
    assert len(server.stream(random_requests(1, 20, 5, seed=0), each_token=False)) == 1
    assert len(server.stream(random_requests(1, 20, 5, seed=0), merged=0.6)) == 1


def test_prompts_differ_from_run_to_run() -> None:
    prompts = [request.prompt for seed in range(3) for request in random_requests(4, 9, 1, seed)]
    assert len({tuple(p) for p in prompts}) == 12


def test_gaps_count_while_all_run() -> None:
    def result(*times: float) -> RequestResult:
        return RequestResult(0.0, times[-1], tokens_s=list(times))

    early, late = result(1, 2, 3, 4), result(2.5, 4.5, 6.5)
    assert measures.all_running([early, late]) == (2.5, 4)
    assert measures.gaps_among([early, late], early) == [1]
    with pytest.raises(BenchError, match="2 streams never ran"):
        measures.all_running([result(1, 2), result(3, 4)])


def test_a_server_that_does_not_start_fails_only_its_items(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--max-model-len", "no")
    item = SuiteItem("x", "what", "ms", "qwen3-0.6b", flags, 1.0, None, False, measure_server=measures.first_token(3))
    measure_alone = SuiteItem(
        "y", "what", "s", "qwen3-0.6b", flags, 1.0, 0.5, True, measure_alone=lambda place: Measurement(2.0, [2.0])
    )
    lines = list(command.measure([item, measure_alone], tmp_path, ()))
    assert [line.name for line in lines] == ["x", "y"]
    assert "before it was ready" in lines[0].failure and "max-model-len" in lines[0].failure
    assert lines[1].measured == Measurement(2.0, [2.0])
    assert "x: the server ended with 2" in capsys.readouterr().err
    assert "| failed: the server ended with 2 before it was ready: |" in command.row(lines[0])


def test_rows_say_which_targets_are_missed() -> None:
    item = next(one for one in ITEMS if one.name == "itl-8b")

    def row(value: float) -> str:
        found = Measurement(value, [value])
        line = command.SuiteRow(item.name, item.what, item.unit, item.model, item.flags, item.target, item.floor, found)
        return command.row(line)

    assert "| 4.1 ms of 1 runs | 4.2 | 3.58 |" in row(4.1)
    assert "| 4.2 (missed) |" in row(4.3)
    rate = next(one for one in ITEMS if one.name == "decode-256")
    assert rate.meets_target(17000) and not rate.meets_target(16000)


def test_every_item_has_flags_that_exist_and_a_model(tmp_path: Path) -> None:
    assert len({item.name for item in ITEMS}) == len(ITEMS)
    for item in ITEMS:
        parsed_flags.from_command_line(list(item.flags))  # raises for an unknown one
        assert (item.measure_server is None) != (item.measure_alone is None)
        assert item.model in shapes.SHAPES


def test_every_model_has_a_config_and_a_tokenizer(tmp_path: Path) -> None:
    for name in ("llama-3.1-8b", "gemma-3-4b", "opt-125m"):
        config = text_part(msgspec.json.decode((shapes.write(name, tmp_path) / "config.json").read_bytes()))
        assert config["vocab_size"] > served.VOCAB[1]
    assert {*shapes.SHAPES} >= {item.model for item in ITEMS}
    assert shapes.architectures("gemma-3-4b") == ["Gemma3ForConditionalGeneration"]


def test_items_are_chosen_by_name_and_by_model() -> None:
    names = [item.name for item in command.choose(["gemma-3-4b", "itl-8b"])]
    assert names == ["itl-8b", "itl-gemma-3"]
    assert command.choose([]) == list(ITEMS)
    with pytest.raises(ConfigError, match=r"gemma: no such item; the items are itl-8b, .*; the models are bge-base"):
        command.choose(["gemma"])


def test_items_of_quantized_models_and_adapters_are_compared_with_the_same_model_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for index, item in enumerate(ITEMS):
        if item in pooling.POOLING_ITEMS:
            continue
        if not item.base:
            in_itself = item.model.startswith(("gpt-oss-120b", "llama-3.3-70b"))
            assert ("quantization_config" in shapes.read(item.model)) == in_itself
            continue
        base = next(one for one in ITEMS[:index] if one.name == item.base)
        assert shapes.read(item.model) | {"quantization_config": None} == shapes.read(base.model) | {
            "quantization_config": None
        }
        assert ("quantization_config" in shapes.read(item.model)) != bool(item.adapters)
        assert not base.base and not base.adapters
        assert set(base.flags) <= set(item.flags)
    assert [one.name for one in command.choose(["itl-8b-w4"])] == ["itl-8b", "itl-8b-w4"]
    values = iter([4.0, 1.9])

    def measured(item: SuiteItem) -> SuiteItem:
        return replace(item, measure_server=None, measure_alone=lambda place: Measurement(next(values), [0.0]))

    lines = list(command.measure([measured(one) for one in command.choose(["itl-8b-w4"])], tmp_path, ()))
    assert [line.base for line in lines] == [None, 4.0]
    assert "| 1.9 (0.47 of itl-8b) ms of 1 runs | 0.5 | 0.31 |" in command.row(lines[1])
    assert "(missed)" in command.row(msgspec.structs.replace(lines[1], base=3.0))
    assert "(missed)" not in command.row(msgspec.structs.replace(lines[1], base=None))


def test_a_models_items_share_one_server() -> None:
    for model in ("qwen3-30b-a3b", "mixtral-8x7b", "deepseek-v2-lite", "gpt-oss-20b", "gemma-4-26b-a4b"):
        assert len({item.flags for item in ITEMS if item.model == model and "dummy-skewed" not in item.flags}) == 1


def test_runs_that_chose_few_experts_are_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    class Server:
        def __init__(self, *counts: tuple[float, float]) -> None:
            self.counters = iter([WorkerCounters(*one) for one in counts]).__next__

    monkeypatch.setattr(measures, "METRICS_S", 0)

    def check(even_routing: bool, *counts: tuple[float, float]) -> float | None:
        return measures.with_counters(lambda served: Measurement(1.0, [1.0]), even_routing)(Server(*counts)).experts

    assert check(True, (100, 200), (195, 300)) == 0.95
    assert check(True, (0, 0), (0, 0)) is None
    assert check(False, (0, 0), (50, 100)) == 0.5
    with pytest.raises(BenchError, match=r"steps chose 0\.50 times as many experts"):
        check(True, (0, 0), (50, 100))


def test_counters_are_read_from_metrics(server: SuiteServer) -> None:
    measures.warm_up(server)
    found, deadline = server.counters(), time.monotonic() + 10
    while not found.step_s["decode"] and time.monotonic() < deadline:  # a worker publishes its counts now and then
        time.sleep(0.05)
        found = server.counters()
    assert (found.experts_hit, found.experts_hit_if_even) == (0, 0)
    assert found.step_s["prefill"] > 0 and found.step_s["decode"] > 0, "the mock worker says how long its steps took"
    assert found.launch_s == {"prefill": 0, "decode": 0}


def test_the_share_of_launches_is_that_of_the_steps_between_two_readings() -> None:
    before = WorkerCounters(0, 0, {"prefill": 1.0, "decode": 2.0}, {"prefill": 0.5, "decode": 0.0})
    after = WorkerCounters(0, 0, {"prefill": 3.0, "decode": 4.0}, {"prefill": 2.0, "decode": 0.0})
    assert after.launch_shares(before) == {"prefill": 0.75}


def test_items_of_an_unknown_architecture_are_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "architectures", lambda name: ["NewForCausalLM"])
    item = next(one for one in ITEMS if one.name == "itl-gpt-oss")
    (line,) = command.measure([item], tmp_path, ())
    assert line.skipped == "no architecture NewForCausalLM here" and not line.failure
    assert "| skipped: no architecture NewForCausalLM here | 2.5 | 1.72 | |" in command.row(line)


def test_starts_are_all_measured_if_a_server_has_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = iter(range(100))

    class Server:
        launched_s = 0.0

        def stream(self, requests: list[SampleRequest]) -> list[RequestResult]:
            return [RequestResult(0, 1, tokens_s=[float(next(launches))], num_input=1, num_output=1)]

    monkeypatch.setattr(measures, "serve", lambda *_: contextlib.nullcontext(Server()))
    cold = SuiteContext(tmp_path, (), tmp_path)
    assert measures.launch_to_first_token(cold).runs == [1.0, 2.0]
    assert measures.launch_to_first_token(msgspec.structs.replace(cold, has_started=True)).runs == [3.0, 4.0]


def test_every_token_has_text(tmp_path: Path) -> None:
    files = tokenizer_files.load(shapes.write("qwen3-0.6b", tmp_path))
    assert files.vocab_size == 151936
    assert files.tokenizer.decode([4095, 4096, 151935]) == " release w4096 w151935"


def test_streams_without_an_event_a_token_are_not_measured(
    server: SuiteServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measures, "warm_up", lambda *_: None)
    monkeypatch.setattr(results, "read", lambda x, n: RequestResult(0, 1, tokens_s=[1.0], num_input=20, num_output=n))
    with pytest.raises(BenchError, match="8 events for 160 tokens"):
        measures.streamed_rate(8, 20, 20)(server)


def test_flags_become_keywords_of_the_offline_api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, object] = {}
    monkeypatch.setattr(measures, "LLM", lambda model, **options: seen.update(options, model=model))
    measures.offline_llm(SuiteContext(tmp_path, ("--no-enable-prefix-caching", "--max-model-len", "8192"), tmp_path))
    assert seen["enable_prefix_caching"] is False and seen["max_model_len"] == 8192


def test_adapters_have_the_shapes_of_the_model(tmp_path: Path) -> None:
    """As a worker reads them; those of a rank differ, though they share a file."""
    flags = adapters.serve_flags("qwen3-0.6b", (2, 2, 8), tmp_path)
    assert flags[:6] == ("--max-loras", "3", "--max-cpu-loras", "3", "--max-lora-rank", "8")
    paths = [Path(one.partition("=")[2]) for one in flags[7:]]
    read = [read_modules(path, AdapterLimits(dtype=torch.bfloat16, max_rank=8)) for path in paths]
    assert len({one.digest for one in read}) == 3
    assert [len(one.modules) for one in read] == [28 * 7] * 3


@pytest.mark.parametrize(("attention_only", "modules"), [(False, 4 + 3 * 3), (True, 4)])
def test_adapters_of_a_mixture_change_all_experts(tmp_path: Path, attention_only: bool, modules: int) -> None:
    config = shapes.read("qwen3-30b-a3b") | {"num_hidden_layers": 2, "num_experts": 3}
    (folder,) = adapters.write_folders(config, [4], tmp_path, attention_only=attention_only)
    read = read_modules(folder, AdapterLimits(dtype=torch.bfloat16))
    assert len(read.modules) == 2 * modules
    experts = [one for one in read.modules if ".experts.2." in one.name and "down" in one.name]
    assert [tuple(one.b.shape) for one in experts if one.b is not None] == [(2048, 4)] * (0 if attention_only else 2)


def test_figures_of_pooling_models_are_of_a_matrix_product_or_of_the_same_server() -> None:
    own = [item for item in ITEMS if item.model in (pooling.BGE, pooling.RERANKER)]
    bases = {item.name: item.base for item in own}
    assert bases["embed-bge-16"] == bases["rerank-100"] == pooling.GEMM
    assert bases["http-bge-16"] == "embed-bge-16" and bases["one-text-16-flood"] == "one-text-16"
    assert len({item.flags for item in own if item.measure_server is not None}) == 2


def test_operations_of_a_text() -> None:
    """12 layers of 12 * 768^2 weights; attention multiplies twice 16 x 16 scores by 768."""
    assert pooling.text_flop(pooling.BGE, 16) == 12 * (2 * 16 * 12 * 768**2 + 4 * 16 * 16 * 768)


def test_texts_over_http(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of the mock worker are 20 ms: so long takes a text alone, and more one in a crowd."""
    monkeypatch.setattr(pooling, "TIMED_CALLS", 6)
    monkeypatch.setattr(pooling, "FLOOD_FIRST_S", 0.3)
    flags = (
        "--worker-cls",
        "mock",
        "--mock-step-ms",
        "20",
        "--max-queue-len",
        "8192",
        "--max-num-batched-tokens",
        "1024",
    )
    with served.serve(shapes.write(pooling.BGE, tmp_path), flags, tmp_path / "log") as running:
        rate = pooling.call_rate(pooling.BGE, TextLoad(128, 16), 32)(running)
        assert 0 < rate.value < 128 * pooling.text_flop(pooling.BGE, 16) / 0.02 / 1e12
        tokenized = pooling.one_text("/tokenize", 16)(running)
        alone = pooling.one_text("/v1/embeddings", 16)(running)
        assert tokenized.value < 20 < alone.value < 200
        beside = pooling.one_text_beside_flood(16, TextLoad(16000, 16), 32)(running)
        assert beside.value > 20 and len(beside.runs) == 2


def test_a_ranking(tmp_path: Path) -> None:
    flags = ("--worker-cls", "mock", "--mock-step-ms", "1")
    with served.serve(shapes.write(pooling.RERANKER, tmp_path), flags, tmp_path / "log") as running:
        assert pooling.rerank_rate(pooling.RERANKER, 5, 24)(running).value > 0


def test_without_a_gpu_there_is_no_matrix_product(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(BenchError, match="ended with 2: torch sees no GPU"):
        pooling.matrix_product(SuiteContext(tmp_path, (), tmp_path))
