"""The layout of KV blocks: what is equal on all ranks of both workers of a transfer, and the part that a rank has."""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import msgspec


class LayerRun(msgspec.Struct, frozen=True, array_like=True):
    """What each of some successive layers keeps of a token."""

    num_layers: int
    kv_heads: int
    head_dim: int
    planes: int = 2  # K and V; 1: latent attention, which has its V in K


class LayoutPart(msgspec.Struct, frozen=True, array_like=True):
    """Some successive layers of a model, and in each of its runs some successive K/V heads."""

    first_layer: int
    num_layers: int
    heads: tuple[tuple[int, int], ...]  # by run of the whole model: the first head, and the one behind the last

    @property
    def layers(self) -> range:
        return range(self.first_layer, self.first_layer + self.num_layers)


@dataclass(frozen=True, slots=True)
class Section:
    """The memory of a `LayerRun` in a pool: [layers, num_blocks, piece_bytes]. Sections follow one another.

    A piece is [planes, heads, head_bytes].
    """

    index: int  # among the sections
    layers: range
    planes: int
    heads: range  # numbers in the model
    head_bytes: int  # of a block, in one layer and plane
    bytes_before: int  # of a block, in earlier sections: the section starts at num_blocks times as many

    @property
    def piece_bytes(self) -> int:
        """Bytes of a block in one layer."""
        return self.planes * len(self.heads) * self.head_bytes

    def head_words(self, heads: range) -> tuple[int, int]:
        """Where some of its heads are in a plane of a block, in words of 8 bytes. Raises ValueError for other bytes."""
        if self.head_bytes % 8:
            raise ValueError(f"a K/V head has {self.head_bytes} bytes in a block, not words of 8 bytes")
        words = self.head_bytes // 8
        return (heads.start - self.heads.start) * words, (heads.stop - self.heads.start) * words

    def local(self, layers: range) -> range:
        """The numbers of layers of the model in this section."""
        return range(layers.start - self.layers.start, layers.stop - self.layers.start)


class BlockLayout(msgspec.Struct, frozen=True, array_like=True, kw_only=True, dict=True):
    """The shape, dtype and model of a KV block. Workers may differ in their number of blocks, and ranks in `part`."""

    runs: tuple[LayerRun, ...]  # all layers of the model, in their order, with all heads
    block_size: int  # tokens
    dtype: str  # of the KV cache, for example "bfloat16"
    dtype_bytes: int
    scales: bytes = b""  # digest of the scales of an 8-bit KV cache
    scope: str = ""  # model, revision and KV dtype, as block hashes have it
    checksums: bool = True
    part: LayoutPart | None = None  # that is in a rank's memory, or goes over a link; None: all

    def of(self, part: LayoutPart | None) -> "BlockLayout":
        """Returns the layout of another part of the same model."""
        return msgspec.structs.replace(self, part=part)

    @property
    def num_layers(self) -> int:
        """Of the model."""
        return sum(run.num_layers for run in self.runs)

    @property
    def whole(self) -> LayoutPart:
        return LayoutPart(0, self.num_layers, tuple((0, run.kv_heads) for run in self.runs))

    @property
    def block_bytes(self) -> int:
        """Bytes of a block in all layers of the part."""
        return sum(len(section.layers) * section.piece_bytes for section in self.sections)

    @property
    def largest_piece_bytes(self) -> int:
        """Bytes of a block in one layer, at most."""
        return max(section.piece_bytes for section in self.sections)

    @functools.cached_property
    def sections(self) -> tuple[Section, ...]:
        """One for each run that has something in the part."""
        part, found = self.part or self.whole, list[Section]()
        first, before = 0, 0
        for run, (head, stop_head) in zip(self.runs, part.heads, strict=True):
            start, stop = max(first, part.layers.start), min(first + run.num_layers, part.layers.stop)
            first += run.num_layers
            if start >= stop or head >= stop_head:
                continue
            head_bytes = run.head_dim * self.block_size * self.dtype_bytes
            made = Section(len(found), range(start, stop), run.planes, range(head, stop_head), head_bytes, before)
            found.append(made)
            before += len(made.layers) * made.piece_bytes
        return tuple(found)

    @property
    def layers(self) -> list[int]:
        return [layer for section in self.sections for layer in section.layers]

    def cut(self, part: LayoutPart) -> list[tuple[Section, Section]]:
        """Returns the sections of a part, each behind the own section that has it.

        Raises ValueError if the own part does not have all of it.
        """
        mine, found = self.part or self.whole, list[tuple[Section, Section]]()
        is_of_model = len(part.heads) == len(self.runs) and _is_in(part.layers, mine.layers)
        for one in self.of(part).sections if is_of_model else ():
            own = self.find_section(one.layers)
            if own is None or not _is_in(one.heads, own.heads):
                raise ValueError(f"{part} is not in {mine}")
            found.append((own, one))
        if not found:
            raise ValueError(f"{part} is nothing of {mine}")
        return found

    def find_section(self, layers: range) -> Section | None:
        """Returns the section that has all of these layers; None if there is none."""
        for section in self.sections:
            if section.layers.start <= layers.start < layers.stop <= section.layers.stop:
                return section
        return None

    def section_of(self, layers: range) -> Section:
        """Returns the section that has all of these layers. Raises ValueError if there is none."""
        section = self.find_section(layers)
        if section is None:
            raise ValueError(f"{layers} are not layers of one of {self.sections}")
        return section


class LinkLayouts(NamedTuple):
    """The layouts of a link between two ranks, as the sender sees it."""

    own: BlockLayout  # of the sender's arena
    part: LayoutPart | None = None  # that goes over the link
    theirs: LayoutPart | None = None  # that the receiver has


_WORDS = {
    "runs": "layers",
    "block_size": "block size",
    "dtype": "KV dtype",
    "dtype_bytes": "bytes of a KV value",
    "scales": "KV scales",
    "scope": "model",
    "checksums": "checksums",
}


def as_text(layout: BlockLayout) -> str:
    """Returns all fields but `part` in words. Two workers can exchange blocks if their texts are equal."""
    return "; ".join(f"{words} {_text(getattr(layout, name))}" for name, words in _WORDS.items())


def differences(mine: BlockLayout, theirs: BlockLayout) -> str:
    """Names the fields that differ, in one line; "" if the two workers can exchange blocks."""
    found: list[str] = []
    for name, words in _WORDS.items():
        ours, other = getattr(mine, name), getattr(theirs, name)
        if ours != other:
            found.append(f"{words} {_text(ours)} here, {_text(other)} there")
    return "; ".join(found)


def _is_in(one: range, other: range) -> bool:
    return other.start <= one.start <= one.stop <= other.stop


def _text(value: object) -> str:
    match value:
        case bool():
            return "on" if value else "off"
        case bytes():
            return value.hex() or "none"
        case str():
            return repr(value)
        case tuple():
            return " + ".join(map(_run_text, value))
    return str(value)


def _run_text(run: LayerRun) -> str:
    latent = ", latent" if run.planes == 1 else ""
    return f"{run.num_layers} of {run.kv_heads} KV heads of {run.head_dim}{latent}"
