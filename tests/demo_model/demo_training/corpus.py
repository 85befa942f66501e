"""The demo model's training text: the sources of the running Python's standard library, split by file.

Run as a module it prints what it found, or writes it with `--out corpus.jsonl.xz`, so that a machine with another
Python trains on the same text.
"""

import argparse
import hashlib
import lzma
import sysconfig
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from enum import StrEnum
from pathlib import Path

import msgspec

SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__"})
# Tables and build records, not code: they would fill the model with code pages and this machine's paths.
SKIPPED_PREFIXES = ("_sysconfigdata", "config-")
TABLE_MARKS = ("decoding_table", "decoding_map", "codecs.make_encoding_map")
# Of a held-out candidate's longer lines, the share that may also stand in a training file.
MAX_SHARED_LINES = 0.3
MIN_LINE_CHARS = 20


class Split(StrEnum):
    TRAIN = "train"
    VALIDATION = "validation"  # picks the checkpoint
    TEST = "test"  # is only reported


class SourceFile(msgspec.Struct, frozen=True):
    path: str  # relative to the standard library, with forward slashes
    text: str
    split: Split


def read_sources(root: Path) -> Iterator[tuple[str, str]]:
    """(path, text) of every source under `root`, by path. Files in no known encoding (test data) are left out."""
    for file in sorted(root.rglob("*.py"), key=lambda file: file.relative_to(root).as_posix()):
        parts = file.relative_to(root).parts
        if SKIPPED_FOLDERS.intersection(parts) or any(part.startswith(SKIPPED_PREFIXES) for part in parts):
            continue
        try:
            with tokenize.open(file) as stream:
                text = stream.read()
        except (SyntaxError, UnicodeDecodeError):
            continue
        is_table = parts[0] == "encodings" and any(mark in text for mark in TABLE_MARKS)
        if text.strip() and not is_table:
            yield "/".join(parts), text


def bucket_of(path: str) -> int:
    """A number below 100 that depends on the path alone: adding a file never moves another one."""
    return int.from_bytes(hashlib.sha256(path.encode()).digest()[:4], "big") % 100


def split_by_path(path: str) -> Split:
    bucket = bucket_of(path)
    if bucket < 2:
        return Split.VALIDATION
    return Split.TEST if bucket < 5 else Split.TRAIN


def long_lines(text: str) -> set[str]:
    return {line.strip() for line in text.splitlines() if len(line.strip()) >= MIN_LINE_CHARS}


def split_sources(sources: Iterable[tuple[str, str]]) -> list[SourceFile]:
    """Splits by path, and gives a held-out candidate that repeats training text back to the training set."""
    files = [SourceFile(path, text, split_by_path(path)) for path, text in sources]
    known: set[str] = set()
    for file in files:
        if file.split is Split.TRAIN:
            known |= long_lines(file.text)
    result = []
    for file in files:
        lines = long_lines(file.text)
        repeats = not lines or len(lines & known) / len(lines) > MAX_SHARED_LINES
        split = Split.TRAIN if repeats else file.split
        result.append(SourceFile(file.path, file.text, split))
    return result


def collect() -> list[SourceFile]:
    """The running Python's standard library, its tests included (they are half of it)."""
    return split_sources(read_sources(Path(sysconfig.get_path("stdlib"))))


def write_corpus(files: list[SourceFile], target: Path) -> None:
    target.write_bytes(lzma.compress(msgspec.json.Encoder().encode_lines(files), preset=6))


def load_corpus(source: Path | None) -> list[SourceFile]:
    """What `write_corpus` wrote, or, without a file, the running Python's own."""
    if source is None:
        return collect()
    return msgspec.json.Decoder(SourceFile).decode_lines(lzma.decompress(source.read_bytes()))


def texts(files: list[SourceFile], split: Split) -> list[str]:
    return [file.text for file in files if file.split is split]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    out: Path | None = parser.parse_args().out
    files = collect()
    counts = Counter(file.split for file in files)
    for split in Split:
        num_bytes = sum(len(text.encode()) for text in texts(files, split))
        print(f"{split:<10} {counts[split]:5d} files {num_bytes:>12,d} bytes")
    if out is not None:
        write_corpus(files, out)


if __name__ == "__main__":
    main()
