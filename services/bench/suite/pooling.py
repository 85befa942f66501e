"""Pooling models: vectors in process and over HTTP, the time of one text and of one ranking, and the items of these.

Rates are operations on real tokens a second, which items divide by those of a matrix product.
"""

import asyncio
import http.client
import itertools
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

import msgspec

from blockyard.services.bench.load import processes
from blockyard.services.bench.load.client import LoadPlan, LoadRun
from blockyard.services.bench.load.results import BenchError
from blockyard.services.bench.server import OpenAIServer, find
from blockyard.services.bench.suite import measures, shapes
from blockyard.services.bench.suite.item import UNCACHED, SuiteItem, compared, low
from blockyard.services.bench.suite.measures import Measurement, SuiteContext, median_of, offline_llm
from blockyard.services.bench.suite.served import VOCAB, SuiteServer, run_load
from blockyard.shared.percentiles import percentile, percentiles_of

WORDS = ("the", "river", "house", "green", "small", "never", "walks", "over", "seven", "paper", "light", "stone")
TERA = 1e12
CALLS_AT_ONCE = 64
FLOOD_CALLS = 4  # of the flood at once: with 32 texts each more than a step holds
FLOOD_PROCESSES = 2
FLOOD_FIRST_S = 1.0  # until the flood fills the queues
TIMED_CALLS = 100  # one after another, in each run
RANKINGS = 5  # one after another, in each run
QUERY_TOKENS = 16


@dataclass(frozen=True, slots=True)
class TextLoad:
    """Texts of one length."""

    num_texts: int
    num_tokens: int  # of each

    def prompts(self, seed: int) -> list[list[int]]:
        rng = random.Random(seed)
        return [rng.choices(range(*VOCAB), k=self.num_tokens) for _ in range(self.num_texts)]


class _TextUsage(msgspec.Struct):
    total_tokens: int


class _RankAnswer(msgspec.Struct):
    usage: _TextUsage


def text_flop(model: str, num_tokens: int) -> float:
    """Returns the floating point operations of a text: linear layers and attention, which a decoder masks by half."""
    config = shapes.read(model)
    hidden, heads, is_encoder = config["hidden_size"], config["num_attention_heads"], config["model_type"] == "bert"
    head_dim = config.get("head_dim") or hidden // heads
    key_heads = config.get("num_key_value_heads") or heads
    weights = 2 * hidden * head_dim * (heads + key_heads)
    weights += (2 if is_encoder else 3) * hidden * config["intermediate_size"]
    attention = (4.0 if is_encoder else 2.0) * num_tokens * heads * head_dim
    return float(num_tokens * config["num_hidden_layers"] * (2 * weights + attention))


def matrix_product(context: SuiteContext) -> Measurement:
    """TFLOP/s of this GPU, measured by a process of its own. Raises BenchError without a GPU."""
    command = [sys.executable, "-P", "-m", "blockyard.services.gpu_worker.bench.matrix_product"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BenchError(f"the matrix product ended with {done.returncode}: {done.stderr[-500:].strip()}")
    return median_of([float(done.stdout) / TERA])


def embed_rate(model: str, load: TextLoad) -> Callable[[SuiteContext], Measurement]:
    """TFLOP/s of `LLM.embed` with all texts as token ids, from the call to the last vector."""

    def measure(context: SuiteContext) -> Measurement:
        runs = []
        with offline_llm(context) as llm:
            for run in range(1 + measures.RUNS):  # the first one captures graphs
                prompts = load.prompts(run)
                begin_s = time.perf_counter()
                found = llm.embed(prompts, use_tqdm=False)
                seconds = time.perf_counter() - begin_s
                if len(found) != load.num_texts:
                    raise BenchError(f"{len(found)} vectors for {load.num_texts} texts")
                runs.append(load.num_texts * text_flop(model, load.num_tokens) / seconds / TERA)
        return median_of(runs[1:])

    return measure


def call_rate(model: str, load: TextLoad, texts_a_call: int) -> Callable[[SuiteServer], Measurement]:
    """TFLOP/s of calls to /v1/embeddings with `texts_a_call` texts as token ids each, base64, CALLS_AT_ONCE at once."""

    def measure(served: SuiteServer) -> Measurement:
        found, runs = find(served.url, None), []
        for run in range(1 + measures.RUNS):
            plan = _calls(found, load, run, texts_a_call, CALLS_AT_ONCE)  # the first run captures graphs
            lens, num = [0] * len(plan.requests), processes.num_for(8 * CALLS_AT_ONCE)
            results = run_load(found.endpoint("embeddings"), plan, lens, num)
            if failed := [one.failure for one in results if one.failure]:
                raise BenchError(f"{len(failed)} of {len(results)} calls failed: {failed[0]}")
            seconds = max(one.ended_s for one in results) - min(one.sent_s for one in results)
            runs.append(len(results) * texts_a_call * text_flop(model, load.num_tokens) / seconds / TERA)
        return median_of(runs[1:])

    return measure


def _calls(found: OpenAIServer, load: TextLoad, seed: int, texts_a_call: int, at_once: int) -> LoadPlan:
    endpoint, model = found.endpoint("embeddings"), found.first_model()
    prompts = load.prompts(seed)
    bodies = [
        endpoint.request({"model": model, "input": prompts[i : i + texts_a_call], "encoding_format": "base64"})
        for i in range(0, len(prompts), texts_a_call)
    ]
    return LoadPlan(bodies, [0.0] * len(bodies), at_once)


def one_text(path: str, num_tokens: int) -> Callable[[SuiteServer], Measurement]:
    """ms: p50 of calls with one text of `num_tokens` tokens, one after another on one connection."""

    def measure(served: SuiteServer) -> Measurement:
        found, times = find(served.url, None), list[float]()
        body = _body(path, found, _text(found, num_tokens))
        _call_times(served, path, body, TIMED_CALLS // 2)
        for _ in range(measures.RUNS):
            times += _call_times(served, path, body, TIMED_CALLS)
        return _of_runs(times, 50)

    return measure


def one_text_beside_flood(num_tokens: int, flood: TextLoad, texts_a_call: int) -> Callable[[SuiteServer], Measurement]:
    """ms: p99 of such calls to /v1/embeddings while FLOOD_CALLS calls of `flood` always run."""

    def measure(served: SuiteServer) -> Measurement:
        found, path = find(served.url, None), "/v1/embeddings"
        body = _body(path, found, _text(found, num_tokens))
        plan = _calls(found, flood, 0, texts_a_call, FLOOD_CALLS)

        async def both() -> list[float]:
            endpoint, lens = found.endpoint("embeddings"), [0] * len(plan.requests)
            flooding = asyncio.create_task(processes.run(endpoint, plan, lens, LoadRun(), FLOOD_PROCESSES))
            await asyncio.sleep(FLOOD_FIRST_S)
            times = await asyncio.to_thread(_call_times, served, path, body, measures.RUNS * TIMED_CALLS)
            if flooding.done():
                failed = [one.failure for one in (await flooding)() if one.failure]
                raise BenchError(f"the flood ended before the text's last call; {len(failed)} failed: {failed[:1]}")
            flooding.cancel()
            await asyncio.wait([flooding])
            return times

        return _of_runs(asyncio.run(both()), 99)

    return measure


def rerank_rate(model: str, num_passages: int, num_tokens: int) -> Callable[[SuiteServer], Measurement]:
    """TFLOP/s of calls to /rerank, one after another: operations on the tokens of all pairs, by the server's count."""

    def measure(served: SuiteServer) -> Measurement:
        found, path, runs = find(served.url, None), "/rerank", list[float]()
        words = _text(found, num_tokens).split()
        documents = [" ".join(words[i % len(words) :] + words[: i % len(words)]) for i in range(num_passages)]
        fields = {"query": _text(found, QUERY_TOKENS), "documents": documents, "return_documents": False}
        body = msgspec.json.encode(fields | {"model": found.first_model()})
        *_, (_, answer) = _calls_in_turn(served, path, body, RANKINGS)
        pair = msgspec.json.decode(answer, type=_RankAnswer).usage.total_tokens / num_passages
        for _ in range(measures.RUNS):
            seconds = percentile(sorted(_call_times(served, path, body, RANKINGS)), 50) / 1e3
            runs.append(num_passages * text_flop(model, round(pair)) / seconds / TERA)
        return median_of(runs)

    return measure


def _of_runs(times: Sequence[float], part: int) -> Measurement:
    runs = [sorted(times[i :: measures.RUNS]) for i in range(measures.RUNS)]
    spread = percentiles_of([one / 1e3 for one in times], 1000)
    return median_of([percentile(one, part) for one in runs], call=spread)


def _text(found: OpenAIServer, num_tokens: int) -> str:
    """Returns words that are `num_tokens` tokens for this server, or the fewest more."""
    model, words = found.first_model(), list[str]()
    for word in itertools.cycle(WORDS):
        words.append(word)
        if found.num_tokens(model, " ".join(words)) >= num_tokens:
            return " ".join(words)
    raise AssertionError("cycles have no end")


def _body(path: str, found: OpenAIServer, text: str) -> bytes:
    field = "prompt" if path == "/tokenize" else "input"
    return msgspec.json.encode({"model": found.first_model(), field: text})


def _calls_in_turn(served: SuiteServer, path: str, body: bytes, num: int) -> Iterator[tuple[float, bytes]]:
    """Yields the ms and the answer of each of `num` calls. Raises BenchError for a status other than 200."""
    parts = urlsplit(served.url)
    with closing(http.client.HTTPConnection(parts.hostname or "", parts.port)) as connection:
        for _ in range(num):
            begin_s = time.perf_counter()
            connection.request("POST", path, body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            text = answer.read()
            ms = 1e3 * (time.perf_counter() - begin_s)
            if answer.status != 200:
                raise BenchError(f"{path}: HTTP {answer.status}: {text[:300].decode(errors='replace')}")
            yield ms, text


def _call_times(served: SuiteServer, path: str, body: bytes, num: int) -> list[float]:
    return [ms for ms, _ in _calls_in_turn(served, path, body, num)]


BGE, RERANKER, Q06_EMBEDDING = "bge-base-en-v1.5", "bge-base-en-v1.5-reranker", "qwen3-embedding-0.6b"
BGE_FLAGS = ("--max-queue-len", "8192")
OVER_HTTP = (*BGE_FLAGS, "--api-gateways", "6")
Q06_FLAGS = (*UNCACHED, "--task", "embed", "--max-model-len", "2048", "--max-queue-len", "8192")
GEMM = "gemm-bf16"
TFLOPS = "TFLOP/s"


def _rate(name: str, what: str, model: str, flags: tuple[str, ...], target: float) -> SuiteItem:
    return SuiteItem(name, what, TFLOPS, model, flags, target, 1.0, True)


def _embed(name: str, title: str, model: str, flags: tuple[str, ...], load: TextLoad, target: float) -> SuiteItem:
    what = f"{title}, in process, texts of {load.num_tokens}"
    item = _rate(f"embed-{name}-{load.num_tokens}", what, model, flags, target)
    return replace(item, measure_alone=embed_rate(model, load), base=GEMM)


def _over_http(load: TextLoad, target: float) -> SuiteItem:
    what = f"bge-base over HTTP, 32 texts a call, texts of {load.num_tokens}"
    item = _rate(f"http-bge-{load.num_tokens}", what, BGE, OVER_HTTP, target)
    return replace(item, measure_server=call_rate(BGE, load, 32), base=f"embed-bge-{load.num_tokens}")


POOLING_ITEMS = (
    SuiteItem(GEMM, "bf16 matrix product of 8,192 cubed", TFLOPS, BGE, (), 700, 989, True,
              measure_alone=matrix_product),
    _embed("bge", "bge-base", BGE, BGE_FLAGS, TextLoad(16384, 16), 0.22),
    _embed("bge", "bge-base", BGE, BGE_FLAGS, TextLoad(8192, 128), 0.43),
    _embed("bge", "bge-base", BGE, BGE_FLAGS, TextLoad(4096, 512), 0.42),
    _embed("0.6b", "Qwen3-Embedding-0.6B", Q06_EMBEDDING, Q06_FLAGS, TextLoad(4096, 128), 0.50),
    _embed("0.6b", "Qwen3-Embedding-0.6B", Q06_EMBEDDING, Q06_FLAGS, TextLoad(2048, 512), 0.60),
    _over_http(TextLoad(16384, 16), 0.25),
    _over_http(TextLoad(8192, 128), 0.6),
    low("tokenize-16", "bge-base, /tokenize of 16 tokens, p50", "ms", BGE, OVER_HTTP, 2.0, None,
        one_text("/tokenize", 16)),
    compared(low("one-text-16", "bge-base, one text of 16 tokens over HTTP, p50", "ms", BGE, OVER_HTTP, 3.5, 1.0,
                 one_text("/v1/embeddings", 16)), "tokenize-16"),
    compared(low("one-text-16-flood", "bge-base, one text of 16 tokens beside a flood of texts of 128, p99", "ms", BGE,
                 OVER_HTTP, 6.0, 1.0, one_text_beside_flood(16, TextLoad(96000, 128), 32)), "one-text-16"),
    replace(_rate("rerank-100", "reranker of bge-base's shape, a query and 100 passages of 256 tokens", RERANKER,
                  BGE_FLAGS, 0.25), measure_server=rerank_rate(RERANKER, 100, 256), base=GEMM),
)  # fmt: skip
