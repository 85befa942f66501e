"""What structured output costs a decode step: the same load with and without a JSON schema, in turns, in one process.

`bench_structured_outputs.py gpu [MODEL]`: true shapes with dummy weights. `bench_structured_outputs.py demo`: the demo
model on the CPU. Every stream writes exactly NUM_OUT tokens: the schema's list is longer than that.

Over HTTP, on the CPU, with a number of rounds as a second argument (`structured_load` has the loads):
`first` a schema's first request, `arrivals` new schemas beside plain streams, `hostile` 2,000 grammars that cannot be
had beside streams, `killed` the matcher process killed.
"""

import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rig import Row, median, table
from structured_output import structured_load

from blockyard.services.bench.suite import shapes
from blockyard.services.launcher.models.model_files import demo_folder
from blockyard.services.offline.llm import LLM
from blockyard.services.offline.outputs import RequestOutput
from blockyard.services.offline.sampling_params import SamplingParams
from blockyard.shared.ring_client.client import RingClient

ROUNDS = 3
HEARTBEATS_S = 1.5  # until the counts of a worker are here
LOADS = {
    "first": (structured_load.first_requests, 40),
    "arrivals": (structured_load.arrivals, 6),
    "hostile": (structured_load.hostile_flood, 4),
    "killed": (structured_load.killed, 4),
}
NUM_IN, NUM_OUT = 256, 256
ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 80},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 80}, "maxItems": 4},
        "size": {"type": "object", "properties": {"x": {"type": "number"}, "y": {"type": "integer"}}},
        "kind": {"enum": ["part", "whole", "none"]},
    },
    "required": ["name", "tags", "size", "kind"],
    "additionalProperties": False,
}
SCHEMA = {
    "type": "object",
    "properties": {"items": {"type": "array", "items": ITEM, "minItems": 1000}},
    "required": ["items"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Decode:
    """Figures of one run."""

    tokens_per_s: float  # the sum over streams, each from its first to its last token
    itl_ms: dict[str, float]  # by kind of stream: the median over its streams of the mean time between tokens


def measure(llm: LLM, kinds: list[str]) -> Decode:
    """One stream for each of `kinds`: "plain" or "schema"."""
    params = {
        "plain": SamplingParams(temperature=1.0, max_tokens=NUM_OUT, ignore_eos=True, seed=1),
        "schema": SamplingParams(
            temperature=1.0, max_tokens=NUM_OUT, ignore_eos=True, seed=1, structured_outputs={"json": SCHEMA}
        ),
    }
    prompts = [{"prompt_token_ids": [100 + (i * 31 + k) % 3000 for k in range(NUM_IN)]} for i in range(len(kinds))]
    outputs = llm.generate(prompts, [params[kind] for kind in kinds], use_tqdm=False)
    assert all(len(one.outputs[0].token_ids) == NUM_OUT for one in outputs), "streams ended early"
    itl = {
        kind: 1e3 * median([_itl_s(one) for one, of in zip(outputs, kinds, strict=True) if of == kind])
        for kind in set(kinds)
    }
    return Decode(sum(1 / _itl_s(one) for one in outputs), itl)


def _itl_s(output: RequestOutput) -> float:
    assert output.metrics is not None
    return (output.metrics.last_token_ts - output.metrics.first_token_ts) / (NUM_OUT - 1)


def compare(llm: LLM, name: str, num: int) -> list[Row]:
    """Rows of `num` streams with a schema against as many without."""
    measure(llm, ["schema"] * num)  # compiles the schema and the kernels
    plain, guided = [], []
    before = mask_counts(llm)
    for _ in range(ROUNDS):
        plain.append(measure(llm, ["plain"] * num))
        guided.append(measure(llm, ["schema"] * num))
    masks, waits = (after - count for after, count in zip(mask_counts(llm), before, strict=True))
    rates = [b.tokens_per_s / a.tokens_per_s for a, b in zip(plain, guided, strict=True)]
    itls = [b.itl_ms["schema"] / a.itl_ms["plain"] for a, b in zip(plain, guided, strict=True)]
    return [
        (f"{name}, {num} streams: tokens/s, schema to plain", _middle(rates), "0.85" if name == "demo" else "0.95"),
        (f"{name}, {num} streams: ITL p50, schema to plain", _middle(itls), "1.10"),
        (f"{name}, {num} streams: share of rows with a schema that wait", f"{waits / (masks + waits):.2%}", "1 %"),
        (
            f"{name}, {num} streams: ITL p50 of plain; of schema",
            f"{median([a.itl_ms['plain'] for a in plain]):.2f}; {median([b.itl_ms['schema'] for b in guided]):.2f} ms",
            "",
        ),
    ]


def mask_counts(llm: LLM) -> tuple[int, int]:
    """Masks that the worker has applied so far, and rows that were left without a token because theirs was late."""

    async def read(client: RingClient) -> tuple[int, int]:
        members = client.counts.members()
        return sum(one.count("masks_total") for one in members), sum(one.count("mask_waits_total") for one in members)

    time.sleep(HEARTBEATS_S)
    return llm._session.call(read)


def beside(llm: LLM, name: str, num: int) -> Row:
    """Plain streams beside as many with a schema, against twice as many plain ones."""
    ratios = []
    for _ in range(ROUNDS):
        alone = measure(llm, ["plain"] * (2 * num))
        ratios.append(measure(llm, ["plain", "schema"] * num).itl_ms["plain"] / alone.itl_ms["plain"])
    what = f"{name}: ITL p50 of {num} plain streams beside {num} with a schema, to {num} more plain"
    return what, _middle(ratios), "1.03"


def _middle(ratios: list[float]) -> str:
    return f"{median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"


@contextmanager
def started(model: Path, num_seqs: int, **flags: object) -> Iterator[LLM]:
    with LLM(str(model), max_model_len=1024, max_num_seqs=num_seqs, enable_prefix_caching=False, **flags) as llm:
        yield llm


def main(where: str, models: list[str]) -> None:
    """models: empty for all."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        if where == "demo":
            with started(demo_folder(), 16, device="cpu") as llm:
                rows += [*compare(llm, "demo", 16), *compare(llm, "demo", 1)]
        for name, sizes, num_beside in (("qwen3-0.6b", (1, 64), 32), ("llama-3.1-8b", (256,), 64)):
            if where == "gpu" and (not models or name in models):
                with started(shapes.write(name, Path(folder)), max(sizes), load_format="dummy") as llm:
                    rows += [row for num in sizes for row in compare(llm, name, num)]
                    rows.append(beside(llm, name, num_beside))
    print(table(rows))


if __name__ == "__main__":
    mode, *numbers = sys.argv[1:] or ["demo"]
    if mode in LOADS:
        load, rounds = LOADS[mode]
        print(table(load(int(numbers[0]) if numbers else rounds)))
    else:
        main(mode, numbers)
