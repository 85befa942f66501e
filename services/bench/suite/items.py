"""The table of items: figure, model, flags, and its target and floor on one NVIDIA H200.

Figures of quantized models and of adapters are divided by that of the same model in bfloat16, without adapters, on the
same machine.
"""

import random

from blockyard.services.bench.datasets import RandomIds, SampleRequest
from blockyard.services.bench.suite import measures
from blockyard.services.bench.suite.adapters import ADAPTER_ITEMS
from blockyard.services.bench.suite.item import (
    B1,
    B8,
    LONG,
    ONE,
    OSS,
    Q06,
    Q30,
    SPREAD,
    TO_9K,
    UNCACHED,
    SuiteItem,
    batch,
    compared,
    high,
    low,
    stream,
    ttft,
)
from blockyard.services.bench.suite.pooling import POOLING_ITEMS
from blockyard.services.bench.suite.served import VOCAB, random_requests

MIXTRAL, V2_LITE, GEMMA_3, GEMMA_4 = "mixtral-8x7b", "deepseek-v2-lite", "gemma-3-4b", "gemma-4-26b-a4b"
MANY = ("--max-num-seqs", "1024", "--max-queue-len", "4096")
FALLBACK = (*ONE, "--model-impl", "transformers")


def _uniform() -> list[SampleRequest]:
    make_prompt, rng = RandomIds(*VOCAB), random.Random(0)
    lengths = [(rng.randint(100, 1024), rng.randint(100, 1024)) for _ in range(256)]
    return [SampleRequest(make_prompt(rng, num_input), num_input, num_output) for num_input, num_output in lengths]


FAMILIES = (
    stream("30b", Q30, "Qwen3-30B-A3B", 2.3, 1.46, TO_9K),
    low("streams-8-30b", "Qwen3-30B-A3B, 8 streams, 128 in / 256 out, ITL", "ms", Q30, TO_9K, 8.0, 6.2,
          measures.inter_token(8, 128, 256)),
    batch("30b", Q30, "Qwen3-30B-A3B", 17.5, 15.7, TO_9K),
    high("decode-256-30b", "Qwen3-30B-A3B, 256 running at context 1,024", Q30, TO_9K, 10500, 12400,
          measures.rate_while_all_run(256, 928, 192)),
    ttft(2048, "30b", Q30, "Qwen3-30B-A3B", 38, 16.3, TO_9K),
    ttft(8192, "30b", Q30, "Qwen3-30B-A3B", 140, 90, TO_9K),
    SuiteItem("offline-30b", "Qwen3-30B-A3B, offline, 256 requests of 1024 in / 1024 out", "tokens/s", Q30, TO_9K,
         7000, 10000, True, measure_alone=measures.offline_rate(lambda: random_requests(256, 1024, 1024, seed=0))),
    SuiteItem("start-30b", "Qwen3-30B-A3B, launch to first token, not the first start", "s", Q30, TO_9K, 20, None,
         False, measure_alone=measures.launch_to_first_token),
    low("skewed-64-30b", "Qwen3-30B-A3B, 64 at 1,024, a tenth of the experts get half of the tokens, ITL", "ms", Q30,
          (*TO_9K, "--load-format", "dummy-skewed"), 20.1, None, measures.inter_token(64, 960, 128)),
    stream("mixtral", MIXTRAL, "Mixtral-8x7B", 7.0, 6.09, ONE),
    batch("mixtral", MIXTRAL, "Mixtral-8x7B", 27, 24.3, ONE),
    stream("v2-lite", V2_LITE, "DeepSeek-V2-Lite", 2.1, 1.17, TO_9K),
    batch("v2-lite", V2_LITE, "DeepSeek-V2-Lite", 10.5, 7.9, TO_9K),
    ttft(8192, "v2-lite", V2_LITE, "DeepSeek-V2-Lite", 115, 58, TO_9K),
    stream("gpt-oss", OSS, "gpt-oss-20b in bfloat16", 2.5, 1.72, ONE),
    batch("gpt-oss", OSS, "gpt-oss-20b in bfloat16", 12.5, 10.5, ONE),
    stream("gemma-4", GEMMA_4, "Gemma-4-26B-A4B", 2.8, 1.84, ONE),
    batch("gemma-4", GEMMA_4, "Gemma-4-26B-A4B", 18, 15.4, ONE),
    stream("gemma-3", GEMMA_3, "Gemma-3-4B", 2.4, 1.85, ONE),
    stream("fallback", B8, "8B by transformers", 5.0, 3.58, FALLBACK),
    batch("fallback", B8, "8B by transformers", 8.3, 5.6, FALLBACK),
)  # fmt: skip


FP8_KV = ("--kv-cache-dtype", "fp8")
V3, V3_BASE = "deepseek-v3-5-layers-fp8", "deepseek-v3-5-layers"
QUANTIZED = (
    compared(stream("8b-fp8", f"{B8}-fp8", "8B fp8", 0.66, 0.54, ONE), "itl-8b"),
    compared(batch("8b-fp8", f"{B8}-fp8", "8B fp8 with fp8 KV", 0.66, 0.52, ONE + FP8_KV), "decode-64"),
    compared(high("decode-256-8b-fp8", "8B fp8 with fp8 KV, 256 running at context 1,024", f"{B8}-fp8", ONE + FP8_KV,
                  1.5, None, measures.rate_while_all_run(256, 896, 256)), "decode-256"),
    compared(SuiteItem("offline-8b-fp8", "8B fp8 with fp8 KV, offline, 768 requests of 1000 in / 1000 out", "tokens/s",
                       f"{B8}-fp8", ONE + FP8_KV, 1.5, None, True,
                       measure_alone=measures.offline_rate(lambda: random_requests(768, 1000, 1000, seed=0))),
             "offline-8b"),
    *(
        compared(ttft(num, "8b-fp8", f"{B8}-fp8", "8B fp8", bar, 0.54, UNCACHED + LONG), f"ttft-8b-{num}")
        for num, bar in ((2048, 0.74), (8192, 0.76))
    ),
    compared(stream("8b-w4", f"{B8}-w4", "8B in 4 bits", 0.50, 0.31, ONE), "itl-8b"),
    compared(batch("8b-w4", f"{B8}-w4", "8B in 4 bits", 0.72, 0.56, ONE), "decode-64"),
    compared(stream("8b-nf4", f"{B8}-nf4", "8B in nf4", 0.56, 0.33, ONE), "itl-8b"),
    compared(stream("8b-hqq", f"{B8}-hqq", "8B in HQQ's 4 bits, groups of 64", 0.54, 0.33, ONE), "itl-8b"),
    compared(stream("8b-q4-k", f"{B8}-q4-k", "8B in blocks of Q4_K", 0.58, 0.36, ONE), "itl-8b"),
    compared(stream("30b-fp8", f"{Q30}-fp8", "Qwen3-30B-A3B fp8", 0.80, 0.55, TO_9K), "itl-30b"),
    compared(batch("30b-fp8", f"{Q30}-fp8", "Qwen3-30B-A3B fp8", 0.64, 0.55, TO_9K), "decode-64-30b"),
    compared(stream("30b-w4", f"{Q30}-w4", "Qwen3-30B-A3B in 4 bits", 0.75, 0.34, TO_9K), "itl-30b"),
    compared(batch("30b-w4", f"{Q30}-w4", "Qwen3-30B-A3B in 4 bits", 0.50, 0.34, TO_9K), "decode-64-30b"),
    compared(stream("gpt-oss-mxfp4", f"{OSS}-mxfp4", "gpt-oss-20b", 0.72, 0.52, ONE), "itl-gpt-oss"),
    compared(batch("gpt-oss-mxfp4", f"{OSS}-mxfp4", "gpt-oss-20b", 0.56, 0.36, ONE), "decode-64-gpt-oss"),
    stream("v3", V3_BASE, "DeepSeek-V3, 5 layers in bfloat16", 2.6, 1.83, ONE),
    batch("v3", V3_BASE, "DeepSeek-V3, 5 layers in bfloat16", 12.5, 10.8, ONE),
    compared(stream("v3-fp8", V3, "DeepSeek-V3, 5 layers, block fp8", 0.72, 0.54, ONE), "itl-v3"),
    compared(batch("v3-fp8", V3, "DeepSeek-V3, 5 layers, block fp8", 0.64, 0.54, ONE), "decode-64-v3"),
    # bfloat16 does not fit: the floor is the time of the bytes, the target a share of it
    stream("120b", "gpt-oss-120b-mxfp4", "gpt-oss-120b", 2.4, 1.19, ONE),
    batch("120b", "gpt-oss-120b-mxfp4", "gpt-oss-120b", 18.0, 14.0, ONE),
    stream("70b-w4", "llama-3.3-70b-w4", "Llama-3.3-70B in 4 bits", 11.9, 8.92, ONE),
    stream("70b-fp8", "llama-3.3-70b-fp8", "Llama-3.3-70B fp8", 19.6, 16.8, ONE),
)  # fmt: skip
ITEMS = (
    low("itl-8b", "8B, one stream, 128 in / 256 out, ITL", "ms", B8, ONE, 4.2, 3.58,
          measures.inter_token(1, 128, 256)),
    low("decode-64", "8B, 64 running at context 1,024, ITL", "ms", B8, ONE, 6.5, 5.5,
          measures.inter_token(64, 960, 128)),
    high("decode-256", "8B, 256 running at context 1,024", B8, ONE, 16800, 19700,
          measures.rate_while_all_run(256, 896, 256)),
    low("graphs-8b", "8B, launch to full graphs, not the first start", "s", B8, (*ONE, *SPREAD), 15, 4,
          measures.launch_to_full_graphs),
    high("http-8b", "8B over HTTP, 252 streams, 512 in / 256 out", B8, (*ONE, *SPREAD), 10500, None,
          measures.streamed_rate(252, 512, 256)),
    *(
        low(f"ttft-8b-{num}", f"8B, first token of a prompt of {num:,}", "ms", B8, UNCACHED + LONG, target, floor,
              measures.first_token(num))
        for num, target, floor in ((2048, 45, 38), (8192, 200, 168), (32000, 1100, 910))
    ),
    low("prefix-16k", "8B, 16k cached + 128 new tokens, first token", "ms", B8, LONG, 12, 4,
          measures.cached_first_token(16384, 128)),
    low("itl-1b", "1B, one stream, 128 in / 256 out, ITL", "ms", B1, ONE, 0.90, 0.59,
          measures.inter_token(1, 128, 256)),
    low("itl-0.6b", "0.6B, one stream, 128 in / 256 out, ITL", "ms", Q06, ONE, 0.65, 0.29,
          measures.inter_token(1, 128, 256)),
    high("http-0.6b-1020", "0.6B over HTTP, 1,020 streams, 32 in / 256 out", Q06, (*ONE, *MANY, *SPREAD), 45000, None,
          measures.streamed_rate(1020, 32, 256)),
    high("http-0.6b-252", "0.6B over HTTP, 252 streams, 32 in / 512 out", Q06, (*ONE, *MANY, *SPREAD), 27000, None,
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
    *ADAPTER_ITEMS,
    *POOLING_ITEMS,
)  # fmt: skip
