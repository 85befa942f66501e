"""The command as users run it, against a real server with a mock worker."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rig import Server, serve

SRC = Path(__file__).parents[3] / ".src"
LOADED = """
import sys
from blockyard.services.cli import main as cli
code = cli.main(["bench", *sys.argv[1:]])
print([name for name in ("torch", "numpy", "transformers", "aiohttp", "tokenizers", "rich") if name in sys.modules])
sys.exit(code)
"""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve(
        "demo", "--worker-cls", "mock", "--mock-step-ms", "2", "--max-num-seqs", "8", "--max-queue-len", "40"
    ) as server:
        yield server


@pytest.fixture(scope="module")
def pooling_server() -> Iterator[Server]:
    with serve("demo", "--worker-cls", "mock", "--task", "embed") as server:
        yield server


def bench(*args: str, program: tuple[str, ...] = ("-m", "blockyard", "bench")) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("BLOCKYARD_", "OPENAI_"))}
    return subprocess.run(
        [sys.executable, *program, *args],
        env=kept | {"PYTHONPATH": str(SRC)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_run_end_to_end(server: Server, tmp_path: Path) -> None:
    words = [
        "--num-prompts",
        "30",
        "--input-len",
        "10:40",
        "--output-len",
        "12",
        "--ignore-eos",
        "--request-rate",
        "100",
    ]
    words += ["--goodput", "ttft:10000", "e2el:20000", "--base-url", f"{server.url}/v1/"]
    words += ["--output", str(tmp_path / "o.json"), "--html", str(tmp_path / "o.html")]
    done = bench("serve", *words, program=("-c", LOADED))
    assert (done.returncode, done.stderr) == (0, "")
    assert "30 requests completed, 0 failed" in done.stdout
    assert done.stdout.endswith("['aiohttp', 'tokenizers']\n"), "neither torch nor numpy is loaded"
    found = json.loads((tmp_path / "o.json").read_text())
    s = found["summary"]
    assert (found["kind"], found["model"], found["failures"]) == ("serve", "demo", {})
    assert (s["completed"], s["output_tokens"], s["asked_output_tokens"], s["requests_off_length"]) == (30, 360, 360, 0)
    assert s["input_tokens"] == sum(r["input_tokens"] for r in found["requests"])
    assert all(10 <= r["input_tokens"] <= 40 for r in found["requests"])
    assert s["good_share"] == 1 and s["goodput_per_s"] == pytest.approx(s["requests_per_s"])
    for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2el_ms"):
        assert 0 <= s[name]["p50"] <= s[name]["p90"] <= s[name]["p99"] <= s[name]["max"]
        assert s[name]["max"] > 0  # a busy machine may bring several events in one read: gaps of 0
    assert s["tpot_ms"]["p50"] >= 1.5, "a step takes 2 ms"
    assert s["e2el_ms"]["mean"] == pytest.approx(s["ttft_ms"]["mean"] + 11 * s["tpot_ms"]["mean"])
    assert 0 < found["client"]["cpu_share"] < 1 and found["client"]["late_ms"]["p50"] < 100
    assert (tmp_path / "o.html").read_text().count("<svg") == 3


def test_chat_with_a_shared_prefix(server: Server, tmp_path: Path) -> None:
    words = ["--endpoint", "chat", "--dataset", "prefix-shared", "--prefix-len", "64", "--input-len", "30"]
    words += ["--output-len", "5", "--ignore-eos", "--num-prompts", "8", "--max-concurrency", "2"]
    done = bench("serve", *words, "--base-url", server.url, "--output", str(tmp_path / "o.json"))
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads((tmp_path / "o.json").read_text())
    assert found["summary"]["output_tokens"] == 40 and found["summary"]["peak_running"] == 2
    counts = [request["input_tokens"] for request in found["requests"]]
    assert all(60 <= count <= 180 for count in counts), "words are about as many tokens as asked for, and a template"


@pytest.mark.parametrize("endpoint", ["embeddings", "rerank"])
def test_pooling_endpoints(pooling_server: Server, tmp_path: Path, endpoint: str) -> None:
    words = ["--endpoint", endpoint, "--batch-size", "4", "--num-prompts", "6", "--input-len", "8"]
    done = bench("serve", *words, "--base-url", pooling_server.url, "--output", str(tmp_path / "o.json"))
    assert (done.returncode, done.stderr) == (0, "")
    s = json.loads((tmp_path / "o.json").read_text())["summary"]
    assert (s["completed"], s["failed"], s["output_tokens"], s["requests_without_usage"]) == (6, 0, 0, 0)
    assert s["input_tokens"] > 6 * 4 * 6 and "TTFT" not in done.stdout and "4 texts a request" in done.stdout


def test_text_codec_of_a_sharegpt_file_are_counted_by_the_server(server: Server, tmp_path: Path) -> None:
    talk = {"conversations": [{"value": "def add(a, b):\n    return"}, {"value": "    return a + b, of course"}]}
    (tmp_path / "s.json").write_text(json.dumps([talk]))
    words = ["--dataset", "sharegpt", "--dataset-path", str(tmp_path / "s.json"), "--num-prompts", "3", "--ignore-eos"]
    done = bench("serve", *words, "--base-url", server.url, "--output", str(tmp_path / "o.json"))
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads((tmp_path / "o.json").read_text())
    assert found["summary"]["completed"] == 3
    assert {r["output_tokens"] for r in found["requests"]} == {r["asked_output_tokens"] for r in found["requests"]}


def test_refusals_are_failures(server: Server, tmp_path: Path) -> None:
    """Far more requests at once than queue and batch hold: the rest get 429."""
    words = ["--num-prompts", "200", "--input-len", "4", "--output-len", "200", "--base-url", server.url]
    done = bench("serve", *words, "--output", str(tmp_path / "o.json"))
    assert done.returncode == 0
    s = json.loads((tmp_path / "o.json").read_text())["summary"]
    assert s["failed"] > 0 and s["completed"] > 0 and s["completed"] + s["failed"] == 200
    assert f"{s['failed']} failed: HTTP 429" in done.stdout


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["speed"], "speed: no such benchmark; the benchmarks are serve, latency, throughput, kernels, suite"),
        (["suite", "itl-9b"], "itl-9b: no such item; the items are itl-8b, decode-64"),
        (
            ["serve", "--goodput", "x:1"],
            "--goodput x:1: expected one of ttft, tpot, itl, e2el and a limit in ms above 0",
        ),
        (["serve", "--base-url", "localhost:8000"], "--base-url localhost:8000: expected http://HOST:PORT"),
        (["serve", "--extra-body", "1"], "--extra-body 1: not a JSON object: Expected `object`, got `int`"),
        (["serve", "--endpoint", "rerank", "--ignore-eos"], "--ignore-eos: --endpoint rerank generates nothing"),
        (["serve", "--endpoint", "embeddings", "--goodput", "ttft:1"], "--goodput ttft:1: --endpoint embeddings has"),
        (["serve", "--batch-size", "2"], "--batch-size: completions takes one prompt a request"),
        (["latency", "a", "b"], "expected one model, got a b"),
        (["latency", "a", "--model", "b"], "model a and --model b: give one"),
        (["throughput", "demo", "--nonsense", "3"], "--nonsense: no such flag"),
        (
            ["throughput", "demo", "--port", "3"],
            "LLM: port: is for `blockyard serve` and `run`; the offline API has no",
        ),
    ],
)
def test_wrong_flags_are_one_line(args: list[str], line: str) -> None:
    done = bench(*args)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"blockyard bench: error: {line}") and done.stderr.count("\n") == 1


def test_errors_of_the_server_are_reported(server: Server) -> None:
    done = bench("serve", "--base-url", server.url, "--vocab-range", "5000:6000")
    assert done.returncode == 1
    assert done.stderr.startswith("blockyard bench: error: the first request failed: HTTP 400: ")
    done = bench("serve", "--base-url", "http://127.0.0.1:1")
    assert done.returncode == 1 and "127.0.0.1:1/v1/models" in done.stderr and "refused" in done.stderr


@pytest.mark.skipif(os.path.exists("/dev/nvidia0"), reason="there is a GPU to measure")
def test_kernels_need_a_gpu() -> None:
    done = bench("kernels")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == ("blockyard bench kernels: torch sees no GPU on this machine, and the kernels run on one\n")


def test_the_suite_lists_its_items() -> None:
    done = bench("suite", "--list", program=("-c", LOADED))
    assert done.returncode == 0 and "itl-8b " in done.stdout
    assert done.stdout.endswith("['aiohttp', 'tokenizers']\n"), "torch is not loaded"


def test_help_defines_the_figures() -> None:
    done = bench("serve", "--help")
    assert done.returncode == 0
    for text in (
        "TPOT  one value a request: (E2EL - TTFT) / (output tokens - 1)",
        "--goodput NAME:MS",
        "answered with 429",
    ):
        assert text in done.stdout
    assert "bench latency" in bench().stdout


def test_offline(tmp_path: Path) -> None:
    mock = ["--worker-cls", "mock", "--mock-step-ms", "1", "--log-level", "error", "--output", str(tmp_path / "o.json")]
    words = [
        "--batch-size",
        "3",
        "--input-len",
        "9",
        "--output-len",
        "8",
        "--num-iters",
        "4",
        "--num-iters-warmup",
        "1",
    ]
    done = bench("latency", *words, *mock, "demo")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads((tmp_path / "o.json").read_text())
    assert found["figures"]["latency_ms"]["p50"] >= 8, "a token takes 1 ms"
    assert found["figures"]["per_output_token_ms"] == pytest.approx(found["figures"]["latency_ms"]["p50"] / 8)
    assert (found["model"], found["engine"]["mock_step_ms"]) == ("demo", 1.0)
    done = bench("throughput", "demo", "--num-prompts", "40", "--input-len", "5:20", "--output-len", "6", *mock)
    assert (done.returncode, done.stderr) == (0, "")
    figures = json.loads((tmp_path / "o.json").read_text())["figures"]
    assert figures["output_tokens"] == 240
    assert figures["output_tokens_per_s"] == pytest.approx(240 / figures["duration_s"])
    assert "40 requests in" in done.stdout
