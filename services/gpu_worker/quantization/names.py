"""Which matrices a quantization_config means by a name: plain names, prefixes, globs, regular expressions, fused names.

Checkpoints of the same model differ in what stands before a name ("model.", "language_model."), and files name what
they leave out as the library does that wrote them. Pure: imports no torch.
"""

import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

from blockyard.services.gpu_worker.loading.checkpoint_names import TEXT_PART, bare
from blockyard.shared.errors import ConfigError
from blockyard.shared.quantization.reading import REGEX

FUSED = {  # names of products -> names of their parts
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
}
HEAD = "lm_head"
# last parts of names of matrices that a method leaves out unless the file names them
ROUTERS = ("gate", "router", "shared_expert_gate")
# first parts of names of output layers: of vocabularies, classifiers and reward models
_OUTPUTS = frozenset({HEAD, "classifier", "cls", "head", "pooler", "score"})
_EMBEDDING = re.compile(r"(wte|wpe|embed\w*|\w*embeddings?)$")  # last parts of names
_LAYER = re.compile(r"(?:.*?\.)?(?:layers?|h|blocks)\.\d+(?=\.)")
_MARKS = "*?["

T = TypeVar("T")


class NamesOfFile(Protocol):
    """Names or expressions of a file, which remember what meant something."""

    def match(self, name: str) -> bool:
        """Whether one of them means what has this name in the checkpoint."""

    def unused(self) -> list[str]:
        """Those that have meant nothing so far."""


class NamePatterns:
    """The names of one list of a file. Implements `NamesOfFile`.

    Lists may have a name for each of a hundred layers, and mixtures ten thousands of matrices: plain names are looked
    up, and all globs are one expression first.
    """

    def __init__(self, patterns: Iterable[str]) -> None:
        """Raises ConfigError for a regular expression that is none."""
        self._patterns = tuple(dict.fromkeys(patterns))
        self._plain = dict[str, list[str]]()  # by the name without prefixes
        self._expressions, self._globs = dict[str, re.Pattern[str]](), dict[str, re.Pattern[str]]()
        for pattern in self._patterns:
            if pattern.startswith(REGEX):
                self._expressions[pattern] = compile_regex(pattern.removeprefix(REGEX), pattern)
            elif any(mark in pattern for mark in _MARKS):
                self._globs[pattern] = re.compile(_of_globs(pattern))
            else:
                self._plain.setdefault(bare(pattern.removesuffix(".")), []).append(pattern)
        self._any_glob = re.compile(_of_globs(*self._globs)) if self._globs else None
        self._used: set[str] = set()

    def match(self, name: str) -> bool:
        """Whether a matrix of this name in the checkpoint is meant. A fused matrix is if all its parts are."""
        if self._match_one(name):
            return True
        parts = split_fused(name)
        return bool(parts) and all([self._match_one(one) for one in parts])

    def _match_one(self, name: str) -> bool:
        found, names = list[str](), variants(name)
        if self._plain:
            runs = {run for one in {bare(one) for one in names} for run in _runs(one)}
            found += [pattern for run in runs for pattern in self._plain.get(run, ())]
        found += _matching(self._expressions, names)
        if self._any_glob is not None and any(map(self._any_glob.match, names)):
            found += _matching(self._globs, names)
        self._used.update(found)
        return bool(found)

    def unused(self) -> list[str]:
        return [pattern for pattern in self._patterns if pattern not in self._used]


def _matching(expressions: Mapping[str, re.Pattern[str]], names: Sequence[str]) -> list[str]:
    return [pattern for pattern, expression in expressions.items() if any(map(expression.match, names))]


def _of_globs(*globs: str) -> str:
    """An expression for the names that globs mean, also for what is below them."""
    return "|".join(fnmatch.translate(one) for glob in globs for one in (glob, f"{glob}.*"))


def _runs(name: str) -> list[str]:
    """All parts of a name that stand side by side: "a.b" has "a", "a.b" and "b"."""
    parts = name.split(".")
    return [".".join(parts[i : j + 1]) for i in range(len(parts)) for j in range(i, len(parts))]


def compile_regex(text: str, shown: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as e:
        raise ConfigError(f"quantization_config: {shown!r} is not a regular expression: {e}") from e


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


def layer_of(name: str) -> str:
    """The layer of a model that a matrix is in, as its name begins: "model.layers.3". "": it is in none."""
    found = _LAYER.match(name)
    return found[0] if found else ""


def is_left_out(name: str) -> bool:
    """Whether methods that quantize all linear layers leave this one out without saying so: heads, routers and
    embeddings."""
    *_, parent, last = "", *name.split(".")
    is_router = last in ROUTERS or parent in ROUTERS  # some routers are modules with a matrix
    return last == HEAD or is_router or _EMBEDDING.match(last) is not None


def is_left_out_at_load(name: str) -> bool:
    """The same of methods that quantize a 16-bit checkpoint while it loads: also the output layers of classifiers,
    which transformers and vLLM leave alone."""
    return is_left_out(name) or bare(name).partition(".")[0] in _OUTPUTS


class SettingsByName(Generic[T]):
    """Settings of single matrices, or of what else a key stands for. Implements `NamesOfFile`."""

    def __init__(self, settings: Mapping[str, T]) -> None:
        self._settings, self._used = dict(settings), set[str]()

    def __bool__(self) -> bool:
        return bool(self._settings)

    def find(self, *names: str) -> T | None:
        """The settings of the first of the names that has some."""
        for name in names:
            if name in self._settings:
                self._used.add(name)
                return self._settings[name]
        return None

    def match(self, name: str) -> bool:
        return self.find(*variants(name)) is not None

    def unused(self) -> list[str]:
        return [name for name in self._settings if name not in self._used]


class SettingsByPattern(Generic[T]):
    """Settings by regular expression, of which the first that matches a name counts. Implements `NamesOfFile`."""

    def __init__(self, settings: Mapping[str, T], *, anywhere: bool = False, marks: tuple[str, ...] = ()) -> None:
        """anywhere: an expression may match a part of a name that is not its beginning. marks: in front of
        expressions. Raises ConfigError for an expression that is none."""
        self._settings, self._anywhere, self._used = dict(settings), anywhere, set[str]()
        self._patterns = {key: compile_regex(_without(marks, key), key) for key in settings}

    def find(self, name: str) -> tuple[str, T] | None:
        """Key and settings."""
        names = variants(name)
        for key, pattern in self._patterns.items():
            matches = pattern.search if self._anywhere else pattern.match
            if any(matches(one) for one in names):
                self._used.add(key)
                return key, self._settings[key]
        return None

    def match(self, name: str) -> bool:
        return self.find(name) is not None

    def unused(self) -> list[str]:
        return [key for key in self._settings if key not in self._used]


def _without(marks: tuple[str, ...], key: str) -> str:
    for mark in marks:
        key = key.removeprefix(mark)
    return key
