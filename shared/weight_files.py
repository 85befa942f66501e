"""Which files of a model's folder are weights, by their names."""

import fnmatch
from collections.abc import Iterable

INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
SAFETENSORS = (INDEX, WHOLE, "*.safetensors")  # the first pattern with files counts
NOT_WEIGHTS = ("consolidated*", "training_args.bin", "optimizer*", "scheduler*", "rng_state*", "tokenizer*")


def is_ignored(name: str, patterns: Iterable[str]) -> bool:
    """Whether a file is not read, though its name is like one of weights. patterns: of --ignore-patterns."""
    return any(fnmatch.fnmatch(name, one) for one in (*NOT_WEIGHTS, *patterns))
