"""Structured output of many JSON schemas through all services: how many answers end by themselves, and are valid.

    PYTHONPATH=.src:tests/bench:tests/support python tests/bench/structured_output/bench_schemas.py [--random 200]
        [--answers 5]

The demo model on the CPU answers each of the random and chosen schemas of `tests/support` at temperature 1; jsonschema
validates what ended by `stop`, formats included. Answers that reach the limit of tokens are counted apart, and so are
schemas that were refused. An invalid answer is printed, and the exit status is then 1.
"""

import argparse
import json
import sys
import time
from collections import Counter
from typing import Any

from json_schemas import chosen_schemas, random_schema, validate
from rig import table

from blockyard.services.launcher.models.model_files import demo_folder
from blockyard.services.offline.llm import LLM
from blockyard.services.offline.sampling_params import SamplingParams
from blockyard.shared.errors import RequestError

PROMPT = "def example() -> dict:\n    return "


def params_of(schema: dict[str, Any], num: int, max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=1.0, max_tokens=max_tokens, n=num, seed=1, structured_outputs={"json": schema})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--random", type=int, default=200, help="random schemas")
    parser.add_argument("--answers", type=int, default=5, help="of each schema")
    parser.add_argument("--max-tokens", type=int, default=600)
    args = parser.parse_args()
    schemas = chosen_schemas() | {f"random {seed}": random_schema(seed) for seed in range(args.random)}
    ended: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    taken: list[str] = []
    invalid = 0
    began = time.monotonic()
    with LLM(str(demo_folder()), device="cpu", max_model_len=args.max_tokens + 64, max_num_seqs=64) as llm:
        for name, schema in schemas.items():
            try:
                llm.generate([PROMPT], [params_of(schema, 1, 1)], use_tqdm=False)
                taken.append(name)
            except RequestError as e:
                refused[str(e)] += 1
        params = [params_of(schemas[name], args.answers, args.max_tokens) for name in taken]
        for name, output in zip(taken, llm.generate([PROMPT] * len(taken), params, use_tqdm=False), strict=True):
            schema = schemas[name]
            for one in output.outputs:
                text, reason = one.text, str(one.finish_reason)
                ended[reason] += 1
                try:
                    if reason == "stop":
                        validate(text, schema)
                except ValueError as e:
                    invalid += 1
                    print(f"invalid: {name}: {json.dumps(schema)}\n  {text!r}\n  {e}")
    rows = [
        ("schemas; of these refused", f"{len(schemas)}; {refused.total()}", ""),
        ("answers", str(ended.total()), ""),
        ("ended by stop", str(ended["stop"]), ""),
        ("of these valid", str(ended["stop"] - invalid), str(ended["stop"])),
        *((f"ended by {reason}", str(count), "") for reason, count in ended.items() if reason != "stop"),
        ("time", f"{time.monotonic() - began:.0f} s", ""),
    ]
    print(table(rows))
    for cause, count in refused.most_common():
        print(f"refused {count}: {cause}")
    sys.exit(invalid > 0)


if __name__ == "__main__":
    main()
