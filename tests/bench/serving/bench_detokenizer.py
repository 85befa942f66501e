"""Tokens a second of one detokenizer core: frames decoded, text made, frames encoded; no sockets.

`python tests/bench/serving/bench_detokenizer.py [TOKENIZER_FOLDER]`. The bar: 100,000 for 256 streams of one token a
step each.
"""

import hashlib
import statistics
import sys
import time
from pathlib import Path

import msgspec

from blockyard.services.detokenizer.streams import TextStreams
from blockyard.services.detokenizer.token_table import TokenTable
from blockyard.shared import tokenizer_files
from blockyard.shared.block_hashes import block_hashes, root_hash
from blockyard.shared.messages import (
    DetokenizerIn,
    StreamOpen,
    TextBatch,
    TextOptions,
    TokenBatch,
    TokenLogprobs,
    TokenRows,
    TokenStep,
)
from blockyard.shared.token_ids import pack
from blockyard.shared.tokenizer_files import TokenizerFiles

ROOT = Path(__file__).parents[3]
NUM_STREAMS, NUM_STEPS, ROUNDS = 256, 400, 5
CASES = {
    "plain": (TextOptions(), 0),
    "4 stop strings": (TextOptions(stop=["\n\n\n\n", "</answer>", "Observation:", "User:"]), 0),
    "5 logprobs": (TextOptions(), 5),
}


def name(stream: int) -> str:
    return f"chatcmpl-{hashlib.md5(str(stream).encode()).hexdigest()}-0"


def frames(ids: list[int], num_logprobs: int) -> list[bytes]:
    """One a step, as the scheduler sends them."""
    encode = msgspec.msgpack.Encoder().encode
    out = []
    streams = range(NUM_STREAMS)
    for step in range(NUM_STEPS):
        tokens = [ids[(step + 7 * stream) % len(ids)] for stream in streams]
        batch = TokenBatch([], [], [], time.time())
        if num_logprobs:
            top = ids[step : step + num_logprobs]
            for stream, token in zip(streams, tokens, strict=True):
                logprobs = [TokenLogprobs(token, -1.0, 1, top, [-1.0] * len(top))]
                batch.steps.append(TokenStep(name(stream), 1, 0, step, [token], logprobs=logprobs))
        else:
            numbers = [1 + stream for stream in streams]
            batch.rows.append(TokenRows(pack(numbers), pack([step] * NUM_STREAMS), pack(tokens)))
        out.append(encode(batch))
    return out


def run(files: TokenizerFiles, data: list[bytes], options: TextOptions) -> float:
    """Tokens a second."""
    streams = TextStreams(TokenTable(files.tokenizer, files.vocab_size))
    opens = [StreamOpen(name(stream), 1, 0, 9, b"", b"", 0, options, 1 + stream) for stream in range(NUM_STREAMS)]
    streams.apply(7, TokenBatch(opens, []))
    decode = msgspec.msgpack.Decoder(DetokenizerIn).decode
    encode = msgspec.msgpack.Encoder().encode
    started = time.process_time()
    for frame in data:
        batch = decode(frame)
        for deltas in streams.apply(7, batch).deltas.values():
            encode(TextBatch(deltas, batch.stamp_s))
    taken = time.process_time() - started
    assert streams.num_open == NUM_STREAMS
    return streams.tokens_total / taken


def main() -> None:
    files = tokenizer_files.load(sys.argv[1] if len(sys.argv) > 1 else ROOT / "shared" / "demo_model")
    ids = files.tokenizer.encode((ROOT / "shared" / "messages" / "steps.py").read_text("utf-8")).ids
    for case, (options, num_logprobs) in CASES.items():
        data = frames(ids, num_logprobs)
        rates = [run(files, data, options) for _ in range(ROUNDS)]
        print(f"{case:16} {statistics.median(rates):10,.0f} tokens/s (median of {ROUNDS}, best {max(rates):,.0f})")
    prompt = bytes(4 * 32768)
    times = []
    for _ in range(20):
        started = time.perf_counter()
        block_hashes(root_hash("model"), prompt, 16)
        times.append(time.perf_counter() - started)
    print(
        f"{'block hashes':16} {1e3 * statistics.median(times):10.2f} ms for 32768 tokens (best {1e3 * min(times):.2f})"
    )


if __name__ == "__main__":
    main()
