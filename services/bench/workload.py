"""Makes the requests of a benchmark from its flags, and the times at which they are sent."""

import argparse
import itertools
import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from blockyard.services.bench import datasets
from blockyard.services.bench.datasets import PromptMaker, SampleRequest
from blockyard.shared.errors import ConfigError

INPUT_LEN, OUTPUT_LEN = "1024", "128"


def check(flags: argparse.Namespace) -> None:
    """Raises ConfigError for flags that do not fit together."""
    if flags.dataset_path and flags.dataset != "sharegpt":
        raise ConfigError(f"--dataset-path: is for --dataset sharegpt, not {flags.dataset}")
    if not 0 <= flags.range_ratio < 1:
        raise ConfigError(f"--range-ratio {flags.range_ratio}: expected at least 0 and less than 1")
    if flags.dataset == "sharegpt" and flags.input_len:
        raise ConfigError("--input-len: --dataset sharegpt brings its own lengths")
    if flags.dataset == "sharegpt" and flags.output_len and not flags.dataset_path:
        raise ConfigError("--output-len: without --dataset-path --dataset sharegpt brings its own lengths")
    for name in ("input_len", "output_len"):
        if getattr(flags, name):
            datasets.lengths(getattr(flags, name), flags.range_ratio, "--" + name.replace("_", "-"))


def requests(flags: argparse.Namespace, make_prompt: PromptMaker, count: Callable[[str], int]) -> list[SampleRequest]:
    """Returns the same requests for the same seed. `count` counts a text's tokens. Raises ConfigError."""
    rng = random.Random(flags.seed)
    outputs = datasets.lengths(flags.output_len or OUTPUT_LEN, flags.range_ratio, "--output-len")
    if flags.dataset_path:
        own = outputs if flags.output_len else None
        return datasets.read_sharegpt(Path(flags.dataset_path), flags.num_prompts, count, own, rng)
    if flags.dataset == "sharegpt":
        return datasets.sharegpt_requests(flags.num_prompts, make_prompt, rng)
    inputs = datasets.lengths(flags.input_len or INPUT_LEN, flags.range_ratio, "--input-len")
    if flags.dataset == "prefix-shared":
        return datasets.prefix_requests(
            flags.num_prompts, flags.prefix_len, flags.num_prefixes, inputs, outputs, make_prompt, rng
        )
    return datasets.random_requests(flags.num_prompts, inputs, outputs, make_prompt, rng)


def without_output(requests: list[SampleRequest]) -> list[SampleRequest]:
    """The requests for a model that generates nothing."""
    return [replace(request, num_output=0) for request in requests]


def due_times(num: int, rate: float, burstiness: float, rng: random.Random) -> list[float]:
    """Returns the seconds after the start at which each of `num` requests is due, ascending.

    `rate` is in requests a second; inf means all at once. The gaps are gamma distributed with shape `burstiness`: 1 is
    a Poisson process, less is bursty, inf is a constant gap. The last request is due at exactly `num / rate`, as in
    vLLM, so that the load does not depend on the seed.
    """
    if math.isinf(rate):
        return [0.0] * num
    gaps = [1.0 if math.isinf(burstiness) else rng.gammavariate(burstiness, 1.0) for _ in range(num)]
    times = list(itertools.accumulate(gaps))
    scale = num / rate / times[-1] if times else 0.0
    return [at * scale for at in times]
