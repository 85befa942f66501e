"""Flags to requests: which dataset with which lengths."""

import argparse
import random
from collections.abc import Callable
from pathlib import Path

from blockyard.services.bench import datasets
from blockyard.services.bench.datasets import PromptMaker, SampleRequest
from blockyard.shared.errors import ConfigError

INPUT_LEN, OUTPUT_LEN = "1024", "128"


def check(flags: argparse.Namespace) -> None:
    """What can be wrong without a server. Raises ConfigError."""
    if flags.dataset_path and flags.dataset != "sharegpt":
        raise ConfigError(f"--dataset-path: is for --dataset sharegpt, not {flags.dataset}")
    if not 0 <= flags.range_ratio < 1:
        raise ConfigError(f"--range-ratio {flags.range_ratio}: expected at least 0 and less than 1")
    if flags.dataset == "sharegpt" and flags.input_len:
        raise ConfigError("--input-len: --dataset sharegpt has lengths of its own")
    if flags.dataset == "sharegpt" and flags.output_len and not flags.dataset_path:
        raise ConfigError("--output-len: without --dataset-path --dataset sharegpt has lengths of its own")
    for name in ("input_len", "output_len"):
        if getattr(flags, name):
            datasets.lengths(getattr(flags, name), flags.range_ratio, "--" + name.replace("_", "-"))


def asks(flags: argparse.Namespace, draw: PromptMaker, count: Callable[[str], int]) -> list[SampleRequest]:
    """The same for the same seed. `count` gives a text's tokens. Raises ConfigError."""
    rng = random.Random(flags.seed)
    outputs = datasets.lengths(flags.output_len or OUTPUT_LEN, flags.range_ratio, "--output-len")
    if flags.dataset_path:
        own = outputs if flags.output_len else None
        return datasets.read_sharegpt(Path(flags.dataset_path), flags.num_prompts, count, own, rng)
    if flags.dataset == "sharegpt":
        return datasets.sharegpt_requests(flags.num_prompts, draw, rng)
    inputs = datasets.lengths(flags.input_len or INPUT_LEN, flags.range_ratio, "--input-len")
    if flags.dataset == "prefix-shared":
        return datasets.prefix_requests(
            flags.num_prompts, flags.prefix_len, flags.num_prefixes, inputs, outputs, draw, rng
        )
    return datasets.random_requests(flags.num_prompts, inputs, outputs, draw, rng)
