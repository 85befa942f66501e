"""The table of items: figure, model, flags, and its target and floor on one NVIDIA H200.

Figures of quantized models and of adapters are divided by that of the same model in bfloat16, without adapters, on the
same machine.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from blockyard.services.bench.datasets import RandomIds, SampleRequest
from blockyard.services.bench.suite import measures
from blockyard.services.bench.suite.adapters import names
from blockyard.services.bench.suite.measures import Measurement, SuiteContext
from blockyard.services.bench.suite.served import VOCAB, SuiteServer, random_requests

B8, B1, Q06 = "llama-3.1-8b", "llama-3.2-1b", "qwen3-0.6b"
Q30, MIXTRAL, V2_LITE = "qwen3-30b-a3b", "mixtral-8x7b", "deepseek-v2-lite"
OSS, GEMMA_3, GEMMA_4 = "gpt-oss-20b", "gemma-3-4b", "gemma-4-26b-a4b"
UNCACHED = ("--no-enable-prefix-caching",)
SHORT, LONG = ("--max-model-len", "8192"), ("--max-model-len", "40000")
MANY = ("--max-num-seqs", "1024", "--max-queue-len", "4096")
SPREAD = ("--api-gateways", "6", "--detokenizers", "2")


@dataclass(frozen=True, slots=True)
class SuiteItem:
    name: str
    what: str
    unit: str
    model: str
    flags: tuple[str, ...]  # of `blockyard serve`, or of `LLM` for offline items
    target: float
    floor: float | None  # limit set by memory bandwidth and tensor cores; None: not computed
    more_is_better: bool
    # one of the two: on a server that items with equal flags share, or starting what it measures
    measure_server: Callable[[SuiteServer], Measurement] | None = None
    measure_alone: Callable[[SuiteContext], Measurement] | None = None
    base: str = ""  # an item before: target and floor are of this item's value divided by that one's
    adapters: tuple[int, ...] = ()  # the ranks of LoRA adapters that the server has, `adapters.names`

    def meets_target(self, value: float) -> bool:
        return value >= self.target if self.more_is_better else value <= self.target


def _uniform() -> list[SampleRequest]:
    make_prompt, rng = RandomIds(*VOCAB), random.Random(0)
    lengths = [(rng.randint(100, 1024), rng.randint(100, 1024)) for _ in range(256)]
    return [SampleRequest(make_prompt(rng, num_input), num_input, num_output) for num_input, num_output in lengths]


def _low(name: str, what: str, unit: str, model: str, flags: tuple[str, ...], target: float, floor: float | None,
          measure_server: Callable[[SuiteServer], Measurement]) -> SuiteItem:  # fmt: skip
    return SuiteItem(name, what, unit, model, flags, target, floor, False, measure_server=measure_server)


def _high(name: str, what: str, model: str, flags: tuple[str, ...], target: float, floor: float | None,
          measure_server: Callable[[SuiteServer], Measurement]) -> SuiteItem:  # fmt: skip
    return SuiteItem(name, what, "tokens/s", model, flags, target, floor, True, measure_server=measure_server)


def _stream(name: str, model: str, title: str, target: float, floor: float, flags: tuple[str, ...]) -> SuiteItem:
    return _low(f"itl-{name}", f"{title}, one stream, 128 in / 256 out, ITL", "ms", model, flags, target, floor,
                measures.inter_token(1, 128, 256))  # fmt: skip


def _batch(name: str, model: str, title: str, target: float, floor: float, flags: tuple[str, ...]) -> SuiteItem:
    return _low(f"decode-64-{name}", f"{title}, 64 running at context 1,024, ITL", "ms", model, flags, target, floor,
                measures.inter_token(64, 960, 128))  # fmt: skip


def _ttft(
    num: int, name: str, model: str, title: str, target: float, floor: float, flags: tuple[str, ...]
) -> SuiteItem:
    return _low(f"ttft-{name}-{num}", f"{title}, first token of a prompt of {num:,}", "ms", model, flags, target, floor,
                measures.first_token(num))  # fmt: skip


ONE = UNCACHED + SHORT
TO_9K = (*UNCACHED, "--max-model-len", "9216")  # for all items of a model, so that they share a server
FALLBACK = (*ONE, "--model-impl", "transformers")
FAMILIES = (
    _stream("30b", Q30, "Qwen3-30B-A3B", 2.3, 1.46, TO_9K),
    _low("streams-8-30b", "Qwen3-30B-A3B, 8 streams, 128 in / 256 out, ITL", "ms", Q30, TO_9K, 8.0, 6.2,
          measures.inter_token(8, 128, 256)),
    _batch("30b", Q30, "Qwen3-30B-A3B", 17.5, 15.7, TO_9K),
    _high("decode-256-30b", "Qwen3-30B-A3B, 256 running at context 1,024", Q30, TO_9K, 10500, 12400,
          measures.rate_while_all_run(256, 928, 192)),
    _ttft(2048, "30b", Q30, "Qwen3-30B-A3B", 38, 16.3, TO_9K),
    _ttft(8192, "30b", Q30, "Qwen3-30B-A3B", 140, 90, TO_9K),
    SuiteItem("offline-30b", "Qwen3-30B-A3B, offline, 256 requests of 1024 in / 1024 out", "tokens/s", Q30, TO_9K,
         7000, 10000, True, measure_alone=measures.offline_rate(lambda: random_requests(256, 1024, 1024, seed=0))),
    SuiteItem("start-30b", "Qwen3-30B-A3B, launch to first token, not the first start", "s", Q30, TO_9K, 20, None,
         False, measure_alone=measures.launch_to_first_token),
    _low("skewed-64-30b", "Qwen3-30B-A3B, 64 at 1,024, a tenth of the experts get half of the tokens, ITL", "ms", Q30,
          (*TO_9K, "--load-format", "dummy-skewed"), 20.1, None, measures.inter_token(64, 960, 128)),
    _stream("mixtral", MIXTRAL, "Mixtral-8x7B", 7.0, 6.09, ONE),
    _batch("mixtral", MIXTRAL, "Mixtral-8x7B", 27, 24.3, ONE),
    _stream("v2-lite", V2_LITE, "DeepSeek-V2-Lite", 2.1, 1.17, TO_9K),
    _batch("v2-lite", V2_LITE, "DeepSeek-V2-Lite", 10.5, 7.9, TO_9K),
    _ttft(8192, "v2-lite", V2_LITE, "DeepSeek-V2-Lite", 115, 58, TO_9K),
    _stream("gpt-oss", OSS, "gpt-oss-20b in bfloat16", 2.5, 1.72, ONE),
    _batch("gpt-oss", OSS, "gpt-oss-20b in bfloat16", 12.5, 10.5, ONE),
    _stream("gemma-4", GEMMA_4, "Gemma-4-26B-A4B", 2.8, 1.84, ONE),
    _batch("gemma-4", GEMMA_4, "Gemma-4-26B-A4B", 18, 15.4, ONE),
    _stream("gemma-3", GEMMA_3, "Gemma-3-4B", 2.4, 1.85, ONE),
    _stream("fallback", B8, "8B by transformers", 5.0, 3.58, FALLBACK),
    _batch("fallback", B8, "8B by transformers", 8.3, 5.6, FALLBACK),
)  # fmt: skip


def _of_bf16(item: SuiteItem, base: str) -> SuiteItem:
    return replace(item, base=base)


FP8_KV = ("--kv-cache-dtype", "fp8")
V3, V3_BASE = "deepseek-v3-5-layers-fp8", "deepseek-v3-5-layers"
QUANTIZED = (
    _of_bf16(_stream("8b-fp8", f"{B8}-fp8", "8B fp8", 0.66, 0.54, ONE), "itl-8b"),
    _of_bf16(_batch("8b-fp8", f"{B8}-fp8", "8B fp8 with fp8 KV", 0.66, 0.52, ONE + FP8_KV), "decode-64"),
    *(
        _of_bf16(_ttft(num, "8b-fp8", f"{B8}-fp8", "8B fp8", bar, 0.54, UNCACHED + LONG), f"ttft-8b-{num}")
        for num, bar in ((2048, 0.74), (8192, 0.76))
    ),
    _of_bf16(_stream("8b-w4", f"{B8}-w4", "8B in 4 bits", 0.50, 0.31, ONE), "itl-8b"),
    _of_bf16(_batch("8b-w4", f"{B8}-w4", "8B in 4 bits", 0.72, 0.56, ONE), "decode-64"),
    _of_bf16(_stream("30b-fp8", f"{Q30}-fp8", "Qwen3-30B-A3B fp8", 0.80, 0.55, TO_9K), "itl-30b"),
    _of_bf16(_batch("30b-fp8", f"{Q30}-fp8", "Qwen3-30B-A3B fp8", 0.64, 0.55, TO_9K), "decode-64-30b"),
    _of_bf16(_stream("30b-w4", f"{Q30}-w4", "Qwen3-30B-A3B in 4 bits", 0.75, 0.34, TO_9K), "itl-30b"),
    _of_bf16(_batch("30b-w4", f"{Q30}-w4", "Qwen3-30B-A3B in 4 bits", 0.50, 0.34, TO_9K), "decode-64-30b"),
    _of_bf16(_stream("gpt-oss-mxfp4", f"{OSS}-mxfp4", "gpt-oss-20b", 0.72, 0.52, ONE), "itl-gpt-oss"),
    _of_bf16(_batch("gpt-oss-mxfp4", f"{OSS}-mxfp4", "gpt-oss-20b", 0.56, 0.36, ONE), "decode-64-gpt-oss"),
    _stream("v3", V3_BASE, "DeepSeek-V3, 5 layers in bfloat16", 2.6, 1.83, ONE),
    _batch("v3", V3_BASE, "DeepSeek-V3, 5 layers in bfloat16", 12.5, 10.8, ONE),
    _of_bf16(_stream("v3-fp8", V3, "DeepSeek-V3, 5 layers, block fp8", 0.72, 0.54, ONE), "itl-v3"),
    _of_bf16(_batch("v3-fp8", V3, "DeepSeek-V3, 5 layers, block fp8", 0.64, 0.54, ONE), "decode-64-v3"),
)


def _adapted(item: SuiteItem, base: str, adapters: tuple[int, ...]) -> SuiteItem:
    return replace(item, base=base, adapters=adapters)


def _adapted_batch(name: str, what: str, target: float, floor: float, ranks: tuple[int, ...], models: Sequence[str]
                   ) -> SuiteItem:  # fmt: skip
    item = _low(f"decode-64-8b-{name}", f"8B, 64 at 1,024, {what}, ITL", "ms", B8, ONE, target, floor,
                measures.inter_token(64, 960, 128, models))  # fmt: skip
    return _adapted(item, "decode-64", ranks)


RANK_16, TO_128 = (16,) * 64, (8, 16, 16, 32, 32, 64, 64, 128)
NAMES = names(64)
ADAPTED = (
    _adapted(_stream("8b-adapters-off", B8, "8B with adapters that no row has", 1.01, 1.0, ONE), "itl-8b", RANK_16),
    _adapted(
        _low("itl-8b-adapter", "8B with an adapter of rank 16, one stream, 128 in / 256 out, ITL", "ms", B8, ONE, 1.14,
             1.08, measures.inter_token(1, 128, 256, NAMES[:1])), "itl-8b", RANK_16),
    _adapted_batch("adapters-off", "no row has an adapter", 1.01, 1.0, RANK_16, ()),
    _adapted_batch("adapters-1", "one adapter", 1.09, 1.05, RANK_16, NAMES[:1]),
    _adapted_batch("adapters-8", "8 adapters", 1.13, 1.07, RANK_16, NAMES[:8]),
    _adapted_batch("adapters-half", "8 adapters, half the rows without", 1.12, 1.07, RANK_16,
                   [name for one in NAMES[:8] for name in (one, "")]),
    _adapted_batch("adapters-64", "64 adapters", 1.37, 1.24, RANK_16, NAMES),
    _adapted_batch("adapters-ranks", "8 adapters of ranks 8 to 128", 1.20, 1.12, TO_128, NAMES[:8]),
    _adapted(
        _low("ttft-8b-adapter-8192", "8B with an adapter of rank 16, first token of a prompt of 8,192", "ms", B8,
             UNCACHED + LONG, 1.10, 1.0, measures.first_token(8192, NAMES[:1])), "ttft-8b-8192", RANK_16[:1]),
    _adapted(
        _high("http-8b-adapters-16", "8B over HTTP, 252 streams, 512 in / 256 out, 16 adapters", B8, (*ONE, *SPREAD),
              0.88, 1.0, measures.streamed_rate(252, 512, 256, NAMES[:16])), "http-8b", RANK_16[:16]),
)  # fmt: skip
ITEMS = (
    _low("itl-8b", "8B, one stream, 128 in / 256 out, ITL", "ms", B8, ONE, 4.2, 3.58,
          measures.inter_token(1, 128, 256)),
    _low("decode-64", "8B, 64 running at context 1,024, ITL", "ms", B8, ONE, 6.5, 5.5,
          measures.inter_token(64, 960, 128)),
    _high("decode-256", "8B, 256 running at context 1,024", B8, ONE, 16800, 19700,
          measures.rate_while_all_run(256, 896, 256)),
    _low("graphs-8b", "8B, launch to full graphs, not the first start", "s", B8, (*ONE, *SPREAD), 15, 4,
          measures.launch_to_full_graphs),
    _high("http-8b", "8B over HTTP, 252 streams, 512 in / 256 out", B8, (*ONE, *SPREAD), 10500, None,
          measures.streamed_rate(252, 512, 256)),
    *(
        _low(f"ttft-8b-{num}", f"8B, first token of a prompt of {num:,}", "ms", B8, UNCACHED + LONG, target, floor,
              measures.first_token(num))
        for num, target, floor in ((2048, 45, 38), (8192, 200, 168), (32000, 1100, 910))
    ),
    _low("prefix-16k", "8B, 16k cached + 128 new tokens, first token", "ms", B8, LONG, 12, 4,
          measures.cached_first_token(16384, 128)),
    _low("itl-1b", "1B, one stream, 128 in / 256 out, ITL", "ms", B1, ONE, 0.90, 0.59,
          measures.inter_token(1, 128, 256)),
    _low("itl-0.6b", "0.6B, one stream, 128 in / 256 out, ITL", "ms", Q06, ONE, 0.65, 0.29,
          measures.inter_token(1, 128, 256)),
    _high("http-0.6b-1020", "0.6B over HTTP, 1,020 streams, 32 in / 256 out", Q06, (*ONE, *MANY, *SPREAD), 45000, None,
          measures.streamed_rate(1020, 32, 256)),
    _high("http-0.6b-252", "0.6B over HTTP, 252 streams, 32 in / 512 out", Q06, (*ONE, *MANY, *SPREAD), 27000, None,
          measures.streamed_rate(252, 32, 512)),
    SuiteItem("offline-8b", "8B, offline, 768 requests of 1000 in / 1000 out", "tokens/s", B8, ONE, 10000, 12000, True,
         measure_alone=measures.offline_rate(lambda: random_requests(768, 1000, 1000, seed=0))),
    SuiteItem("offline-0.6b", "0.6B, offline, 256 requests, 100 to 1024 in and out", "tokens/s", Q06, ONE, 27000, 36000,
         True, measure_alone=measures.offline_rate(_uniform)),
    SuiteItem("start-8b", "8B, launch to first token, not the first start", "s", B8, ONE, 10, 3, False,
         measure_alone=measures.launch_to_first_token),
    SuiteItem("ring-cost", "8B, 64 streams, server by offline loop", "of 1", B8, ONE, 0.97, 1.0, True,
         measure_alone=measures.cost_of_the_ring(64, 512, 256)),
    *FAMILIES,
    *QUANTIZED,
    *ADAPTED,
)  # fmt: skip
