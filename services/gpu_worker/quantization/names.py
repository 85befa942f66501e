"""Which matrices a quantization_config means by a name: plain names, prefixes, globs, regular expressions, fused names.

Checkpoints of the same model differ in what stands before a name ("model.", "language_model."), and files name what
they leave out as the library does that wrote them. Pure: imports no torch.
"""

import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from blockyard.services.gpu_worker.loading.weights import PREFIXES, TEXT_PART
from blockyard.shared.errors import ConfigError

REGEX = "re:"
FUSED = {  # names of products -> names of their parts
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
}
HEAD = "lm_head"
# last parts of names of matrices that a method leaves out unless the file names them
ROUTERS = ("gate", "router", "shared_expert_gate")
_EMBEDDING = re.compile(r"(wte|wpe|embed\w*|\w*embeddings?)$")  # last parts of names
_MARKS = "*?["


class NamePatterns:
    """The names of one list of a file. It remembers which of them meant something."""

    def __init__(self, patterns: Iterable[str]) -> None:
        """Raises ConfigError for a regular expression that is none."""
        self._patterns = tuple(dict.fromkeys(patterns))
        self._tests = {pattern: _Test(pattern) for pattern in self._patterns}
        self._used: set[str] = set()

    def match(self, name: str) -> bool:
        """Whether a matrix of this name in the checkpoint is meant. A fused matrix is if all its parts are."""
        if self._match_one(name):
            return True
        parts = split_fused(name)
        return bool(parts) and all([self._match_one(one) for one in parts])

    def _match_one(self, name: str) -> bool:
        found = [pattern for pattern, test in self._tests.items() if test.match(name)]
        self._used.update(found)
        return bool(found)

    def unused(self) -> list[str]:
        """The patterns that have meant no matrix so far."""
        return [pattern for pattern in self._patterns if pattern not in self._used]


class _Test:
    """One pattern."""

    def __init__(self, pattern: str) -> None:
        self._regex: re.Pattern[str] | None = None
        self._glob: str | None = None
        self._parts: list[str] = []
        if pattern.startswith(REGEX):
            self._regex = compile_regex(pattern.removeprefix(REGEX), pattern)
        elif any(mark in pattern for mark in _MARKS):
            self._glob = pattern
        else:
            self._parts = bare(pattern).split(".")

    def match(self, name: str) -> bool:
        names = variants(name)
        if self._regex is not None:
            return any(self._regex.match(one) for one in names)
        if self._glob is not None:
            return any(fnmatch.fnmatchcase(one, self._glob) for one in names)
        return any(_contains(bare(one).split("."), self._parts) for one in names)


def compile_regex(text: str, shown: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as e:
        raise ConfigError(f"quantization_config: {shown!r} is not a regular expression: {e}") from e


def bare(name: str) -> str:
    """Returns the name without the prefixes that differ between checkpoints of one model."""
    name = name.removeprefix("model.").removeprefix(TEXT_PART)
    for prefix in PREFIXES:
        if prefix:
            name = name.removeprefix(prefix)
    return name


def variants(name: str) -> list[str]:
    """The ways in which files may spell the name of a matrix, first as it is; also as a part of a fused one."""
    short = bare(name)
    found = [name]
    for one in (short, *fused_names(short)):
        found += [one, f"model.{one}", f"{TEXT_PART}{one}", f"{TEXT_PART}model.{one}", f"model.{TEXT_PART}{one}"]
    return list(dict.fromkeys(found))


def fused_names(name: str) -> list[str]:
    """Names of products that have the matrix `name` as a part."""
    head, dot, last = name.rpartition(".")
    return [f"{head}{dot}{fused}" for fused, parts in FUSED.items() if last in parts]


def split_fused(name: str) -> list[str]:
    """Names of the parts of a matrix that checkpoints may also have one by one, or none."""
    head, dot, last = name.rpartition(".")
    return [f"{head}{dot}{one}" for one in FUSED.get(last, ())]


def is_left_out(name: str) -> bool:
    """Whether methods that quantize all linear layers leave this one out without saying so: heads, routers and
    embeddings."""
    *_, parent, last = "", *name.split(".")
    is_router = last in ROUTERS or parent in ROUTERS  # some routers are modules with a matrix
    return last == HEAD or is_router or _EMBEDDING.match(last) is not None


def find_rule(rules: Mapping[str, Mapping[str, Any]], name: str) -> Mapping[str, Any] | None:
    """GPTQModel's `dynamic`: the first rule that matches gives other settings of a matrix, or leaves it out.

    rules: by regular expression, with "-:" in front of one that leaves out and perhaps "+:" in front of others (see
    "Dynamic quantization" in GPTQModel's README). Returns None for a matrix that is left out, and {} for one without
    a rule. Raises ConfigError for a regular expression that is none.
    """
    for key, settings in rules.items():
        pattern = compile_regex(key.removeprefix("-:").removeprefix("+:"), key)
        if any(pattern.match(one) for one in variants(name)):
            return None if key.startswith("-:") else settings
    return {}


def _contains(parts: Sequence[str], some: Sequence[str]) -> bool:
    """Whether `some` stand in `parts` side by side."""
    return any(list(parts[i : i + len(some)]) == list(some) for i in range(len(parts) - len(some) + 1))
