"""`blockyard simulate`: flags to a simulation's settings, traces, and the command itself."""

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from blockyard.services.bench import simulate
from blockyard.services.launcher.supervision.child import environment
from blockyard.shared.config.services.simulation import CostModel, LatencyLimits, SimulatedKill, SimulationConfig
from blockyard.shared.errors import ConfigError
from blockyard.shared.messages import KVRole


def settings(*args: str) -> SimulationConfig:
    parsed, rest = simulate.parser().parse_known_args(args)
    return simulate.simulation_config(parsed, rest)


def lines(*args: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in simulate.generate(simulate.parser().parse_args(args))]


def test_flags_of_serve_reach_the_scheduler_and_the_workers() -> None:
    found = settings("a/t.jsonl", "--max-num-seqs", "7", "--run-ahead", "3", "--no-enable-prefix-caching")
    assert (found.scheduler.max_num_seqs, found.scheduler.depth) == (7, 3)
    assert not found.scheduler.enable_prefix_caching
    assert found.scheduler.max_num_batched_tokens == 2048, "a GPU's"
    assert (found.trace, found.html) == ("a/t.jsonl", "t.html")
    (worker,) = found.fleet
    assert (worker.role, worker.num_workers, worker.num_blocks, worker.num_host_blocks) == (KVRole.BOTH, 1, 55_000, 0)
    more = settings(
        "-", "--num-gpu-blocks-override", "9", "--block-size", "32", "--max-model-len", "100", "--workers", "4"
    )
    assert (more.trace, more.html) == ("/dev/stdin", "simulation.html")
    assert (more.block_size, more.max_model_len) == (32, 100)
    assert [(each.num_blocks, each.num_workers) for each in more.fleet] == [(9, 4)]
    assert settings("t", "--data-parallel-size", "3").fleet[0].num_workers == 3
    whole = settings("t", "--no-enable-chunked-prefill", "--max-model-len", "5000")
    assert whole.scheduler.max_num_batched_tokens == 5000 and not whole.scheduler.enable_chunked_prefill


def test_host_memory_is_counted_in_blocks() -> None:
    assert settings("t").fleet[0].num_host_blocks == 0
    assert settings("t", "--preemption-mode", "swap").fleet[0].num_host_blocks == 4 * 2**30 // (16 * 131_072)
    large = settings("t", "--swap-space", "64000", "--block-size", "32")
    assert large.fleet[0].num_host_blocks == 64000 * 2**30 // 2**22


def test_roles_have_workers_and_flags_of_their_own() -> None:
    found = settings(
        *("t", "--prefill-workers", "4", "--decode-workers", "6", "--max-num-seqs", "100"),
        *("--prefill.max-num-batched-tokens", "4096", "--decode.max-num-batched-tokens", "300"),
        *("--decode.max-num-seqs", "200", "--decode.num-gpu-blocks-override", "77"),
    )
    sizes = [(one.role, one.num_workers, one.max_num_batched_tokens, one.max_num_seqs) for one in found.fleet]
    assert sizes == [(KVRole.PREFILL, 4, 4096, 100), (KVRole.DECODE, 6, 300, 200)]
    assert [each.num_blocks for each in found.fleet] == [55_000, 77]
    assert (found.scheduler.max_num_batched_tokens, found.scheduler.max_num_seqs) == (4096, 200), "the largest"
    mixed = settings("t", "--workers", "2", "--prefill-workers", "1")
    assert [(each.role, each.num_workers) for each in mixed.fleet] == [(KVRole.BOTH, 2), (KVRole.PREFILL, 1)]


def test_links_and_deaths_are_flags() -> None:
    found = settings(
        *("t", "--kv-link-gb-per-s", "3.6", "--kv-link-latency-us", "50", "--kv-link-unstreamed"),
        *("--kill", "prefill@3", "decode@4.5", "--restart-s", "2"),
    )
    cost = found.cost
    assert (cost.link_bytes_s, cost.link_latency_s, cost.stream_layers) == (3.6e9, pytest.approx(50e-6), False)
    assert found.kills == [SimulatedKill(KVRole.PREFILL, 3.0), SimulatedKill(KVRole.DECODE, 4.5)]
    assert found.restart_s == 2.0
    for wrong in ("prefill", "sender@3", "decode@soon"):
        with pytest.raises(ConfigError, match=f"--kill {wrong}: expected both, prefill, decode and the second"):
            settings("t", "--kill", wrong)


def test_goodput_takes_both_limits() -> None:
    assert settings("t", "--workers", "4", "--goodput", "ttft:1000", "itl:8").goodput == LatencyLimits(
        ttft_ms=1000, itl_ms=8
    )
    for words in (["ttft:1000"], ["ttft:1000", "itl:8", "e2el:9000"]):
        with pytest.raises(ConfigError, match="expected both limits"):
            settings("t", "--goodput", *words)


def test_flags_without_effect_are_refused() -> None:
    for args, message in (
        (("t", "--port", "1"), "--port: has no effect"),
        (("t", "--gpu-memory-utilization", "0.5"), "has no effect"),
        (("t", "--decode-workers", "1", "--decode.cpu-threads", "2"), "--decode.cpu-threads: has no effect"),
        (("t", "--preemption-mode", "swap", "--swap-space", "0"), "needs some"),
        (("t", "u"), "expected one trace, got t u"),
        ((), "expected one trace, got none"),
        (("t", "--max-num-seq", "1"), "did you mean"),
    ):
        with pytest.raises(ConfigError, match=message):
            settings(*args)
    with pytest.raises(ConfigError, match="takes no other flags"):
        simulate.main(["--generate", "random", "t"])


def test_costs_come_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate.main(["--print-cost"]) == 0
    printed = capsys.readouterr().out
    assert msgspec.json.decode(printed, type=CostModel) == CostModel()
    file = tmp_path / "cost.json"
    file.write_text('{"name": "mine", "num_blocks": 5, "max_model_len": 60}')
    found = settings("t", "--cost", str(file))
    assert (found.cost.name, found.fleet[0].num_blocks, found.max_model_len) == ("mine", 5, 60)
    file.write_text('{"row": 1}')
    with pytest.raises(ConfigError, match="unknown field `row`"):
        settings("t", "--cost", str(file))


def test_generated_traces() -> None:
    found = lines("--generate", "sharegpt", "--requests", "200", "--rate", "50", "--tenant", "a")
    assert len(found) == 200 and found[-1]["arrival_s"] == pytest.approx(4.0)
    assert {one["tenant"] for one in found} == {"a"} and len({one["prompt_tokens"] for one in found}) > 50
    assert found == lines("--generate", "sharegpt", "--requests", "200", "--rate", "50", "--tenant", "a")
    shared = lines("--generate", "prefix-shared", "--requests", "50", "--rate", "inf", "--num-prefixes", "3")
    assert {one["prefix_group"] for one in shared} == {"0", "1", "2"}
    assert all(one["prefix_tokens"] == 512 and one["prompt_tokens"] == 1536 for one in shared)
    (one,) = lines(
        "--generate", "random", "--requests", "1", "--input-len", "7:7", "--choices", "2", "--priority", "-1"
    )
    assert (one["prompt_tokens"], one["output_tokens"], one["n"], one["priority"]) == (7, 128, 2, -1)


def test_the_command_writes_table_and_report(tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text(
        "".join(simulate.generate(simulate.parser().parse_args(["--generate", "sharegpt", "--requests", "30"])))
    )
    command = [sys.executable, "-P", "-m", "blockyard", "simulate", str(trace), "--svg", "t.svg"]
    run = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "30 requests completed" in run.stdout and "TTFT" in run.stdout
    assert (tmp_path / "t.html").read_text().count("<polyline") >= 8
    assert (tmp_path / "t.svg").read_text().startswith("<svg ")
    wrong = subprocess.run(
        [*command[:-2], "--html", "no/folder"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert wrong.returncode == 2 and "no/folder" in wrong.stderr
