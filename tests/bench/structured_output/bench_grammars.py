"""Masks of structured output at a vocabulary of 131,072 tokens, on one thread, and the time of a new schema.

    python tests/bench/structured_output/bench_grammars.py [--engine guidance] [--tokens 400]

The tokenizer is synthetic: byte-level BPE whose tokens are all bytes and random lower-case words, with and without a
space before them. Random allowed tokens write values of schemas of four sizes; a mask is timed with what `fill` of a
matcher does, by the thread's wall-clock time.
"""

import argparse
import asyncio
import json
import os
import random
import string
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rig import cpu_seconds
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from blockyard.services.tokenizer_pool.grammar_checks import GrammarChecks
from blockyard.services.tokenizer_pool.workers.job_limits import MIB, JobLimits
from blockyard.shared.config.services.process import BusConfig, ProcessConfig
from blockyard.shared.config.services.tokenizer import TokenizerConfig
from blockyard.shared.grammars.engines import Engines
from blockyard.shared.grammars.interface import CompiledGrammar, Vocabulary
from blockyard.shared.messages import Grammar, GrammarEngine, GrammarKind, Tokenize

NUM_TOKENS = 131_072
EOS = NUM_TOKENS - 1


def tokenizer_json(rng: random.Random) -> str:
    """Merges build each word from its first character on, so that all of them can be made."""
    vocab = {char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges: list[tuple[str, str]] = []
    while len(vocab) < NUM_TOKENS - 1:
        word = rng.choice(("", "Ġ")) + "".join(rng.choices(string.ascii_lowercase, k=rng.randint(2, 7)))
        for end in range(2, len(word) + 1):
            if word[:end] not in vocab and len(vocab) < NUM_TOKENS - 1:
                vocab[word[:end]] = len(vocab)
                merges.append((word[: end - 1], word[end - 1]))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    return tokenizer.to_str()


def fields(number: int, salt: str = "") -> dict[str, object]:
    kinds: list[dict[str, object]] = [
        {"type": "string"},
        {"type": "integer"},
        {"type": "boolean"},
        {"enum": ["red", "green", "blue"]},
        {"type": "array", "items": {"type": "number"}, "maxItems": 4},
    ]
    properties = {f"field_{salt}{i}": kinds[i % len(kinds)] for i in range(number)}
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def nested() -> dict[str, object]:
    person = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 80}, "age": {"type": "integer", "minimum": 0}},
        "required": ["name", "age"],
    }
    return {"type": "object", "properties": {"people": {"type": "array", "items": person}}, "required": ["people"]}


SCHEMAS = {f"{number} fields": fields(number) for number in (2, 100, 400)} | {"nested, maxLength 80": nested()}


def masks(compiled: CompiledGrammar, vocabulary: Vocabulary, num_tokens: int, rng: random.Random) -> list[float]:
    """Microseconds of each mask while random tokens are taken."""
    words = np.zeros(vocabulary.num_mask_words, dtype=np.int32)
    matcher, taken = compiled.matcher(), []
    for _ in range(num_tokens):
        began = time.perf_counter()
        matcher.fill(words)
        taken.append((time.perf_counter() - began) * 1e6)
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
        token = int(allowed[rng.randrange(len(allowed))])
        assert matcher.accept([token]) == 1
        if token == EOS:
            matcher = compiled.matcher()
    return taken


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", default="guidance", choices=[e.value for e in GrammarEngine if e != "auto"])
    parser.add_argument("--tokens", type=int, default=400, help="of each schema")
    args = parser.parse_args()
    rng = random.Random(1)
    vocabulary = Vocabulary(tokenizer_json(rng), NUM_TOKENS, [EOS])
    engines, engine = Engines(vocabulary), GrammarEngine(args.engine)
    began = time.perf_counter()
    engines.load(engine)
    print(f"{engine.value}: engine loaded in {time.perf_counter() - began:.2f} s; {NUM_TOKENS} tokens (synthetic)")
    every: list[float] = []
    for name, schema in SCHEMAS.items():
        grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema), engine)
        began = time.perf_counter()
        compiled = engines.compile(grammar)
        verdict_ms = (time.perf_counter() - began) * 1e3
        taken = masks(compiled, vocabulary, args.tokens, rng)
        every += taken
        p50, p99 = np.percentile(taken, [50, 99])
        print(f"  {name:22} first mask in {verdict_ms:7.1f} ms; mask p50 {p50:6.1f} us, p99 {p99:7.1f} us")
    p50, p99 = np.percentile(every, [50, 99])
    print(f"  all {len(every)} masks: p50 {p50:.1f} us, p99 {p99:.1f} us")
    found = asyncio.run(verdicts(vocabulary, engine))
    times = found.times_ms[1:]
    print(f"  a first grammar until its verdict: {found.times_ms[0]:.0f} ms; {found.first_cpu_s:.2f} s of CPU")
    print(f"  a new schema of 400 fields until its verdict: p50 {np.median(times):.1f} ms, worst {max(times):.1f} ms;")
    print(f"    {1e3 * found.later_cpu_s / len(times):.0f} ms of CPU each; load average {os.getloadavg()[0]:.1f}")


@dataclass(slots=True)
class Verdicts:
    times_ms: list[float]  # of 21 new schemas; with the first one the workers of the engine start
    first_cpu_s: float  # of the workers and their server, with the start
    later_cpu_s: float  # of the other 20 together


async def verdicts(vocabulary: Vocabulary, engine: GrammarEngine) -> Verdicts:
    answered: asyncio.Queue[object] = asyncio.Queue()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "tokenizer.json").write_text(vocabulary.tokenizer_json, "utf-8")
        bus = BusConfig(registry="ipc:///nowhere", bind="ipc:///")
        config = TokenizerConfig(
            process=ProcessConfig(name="bench", bus=bus), tokenizer_path=folder, served_model_names=[]
        )
        checks = GrammarChecks(config, JobLimits(memory_bytes=512 * MIB, memory_bytes_per_token=0))
        checks.set_model(NUM_TOKENS, [EOS])
        serving = asyncio.create_task(checks.run(lambda peer, work, verdict: answered.put_nowait(verdict)))
        times, cpu_s = [], []
        for index in range(21):
            schema = json.dumps(fields(400, f"{index}_"))
            began = time.perf_counter()
            await asyncio.sleep(0)
            checks.submit(1, Tokenize("r", "m", grammar=Grammar(GrammarKind.JSON_SCHEMA, schema, engine)))
            verdict = await answered.get()
            assert isinstance(verdict, Grammar), verdict
            times.append((time.perf_counter() - began) * 1e3)
            workers = checks.worker_pids
            cpu_s.append(sum(map(cpu_seconds, {*workers, *map(parent_of, workers)})))
        serving.cancel()
        await asyncio.wait([serving])
    return Verdicts(times, cpu_s[0], cpu_s[-1] - cpu_s[0])


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


if __name__ == "__main__":
    main()
