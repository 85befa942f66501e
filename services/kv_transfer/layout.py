"""The layout of KV blocks, which must be equal on both workers of a transfer."""

import functools
import math
from dataclasses import dataclass

import msgspec


class LayerRun(msgspec.Struct, frozen=True, array_like=True):
    """What each of some successive layers keeps of a token."""

    num_layers: int
    kv_heads: int
    head_dim: int
    planes: int = 2  # K and V; 1: latent attention, which has its V in K


@dataclass(frozen=True, slots=True)
class Section:
    """The memory of a `LayerRun` in a pool: [layers, num_blocks, piece_bytes]. Sections follow one another."""

    index: int  # among the sections
    layers: range
    piece_bytes: int  # of a block in one layer
    bytes_before: int  # of a block, in earlier sections: the section starts at num_blocks times as many

    def local(self, layers: range) -> range:
        """The numbers of layers of the model in this section."""
        return range(layers.start - self.layers.start, layers.stop - self.layers.start)


class BlockLayout(msgspec.Struct, frozen=True, array_like=True, kw_only=True, dict=True):
    """The shape, dtype and model of a KV block. Workers may differ in their number of blocks."""

    runs: tuple[LayerRun, ...]  # all layers of the model, in their order
    block_size: int  # tokens
    dtype: str  # of the KV cache, for example "bfloat16"
    dtype_bytes: int
    scales: bytes = b""  # digest of the scales of an 8-bit KV cache
    scope: str = ""  # model, revision and KV dtype, as block hashes have it
    checksums: bool = True

    @property
    def num_layers(self) -> int:
        return sum(run.num_layers for run in self.runs)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block in all layers."""
        return sum(len(section.layers) * section.piece_bytes for section in self.sections)

    @property
    def largest_piece_bytes(self) -> int:
        """Bytes of a block in one layer, at most."""
        return max(section.piece_bytes for section in self.sections)

    @functools.cached_property
    def sections(self) -> tuple[Section, ...]:
        """One for each run."""
        found: list[Section] = []
        first, before = 0, 0
        for index, run in enumerate(self.runs):
            layers = range(first, first + run.num_layers)
            piece = math.prod((run.planes, run.kv_heads, run.head_dim, self.block_size, self.dtype_bytes))
            found.append(Section(index, layers, piece, before))
            first, before = layers.stop, before + len(layers) * piece
        return tuple(found)

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
    """Returns all fields in words. Two workers can exchange blocks if their texts are equal."""
    return "; ".join(f"{words} {_text(getattr(layout, name))}" for name, words in _WORDS.items())


def differences(mine: BlockLayout, theirs: BlockLayout) -> str:
    """Names the fields that differ, in one line; "" if the two workers can exchange blocks."""
    found: list[str] = []
    for name, words in _WORDS.items():
        ours, other = getattr(mine, name), getattr(theirs, name)
        if ours != other:
            found.append(f"{words} {_text(ours)} here, {_text(other)} there")
    return "; ".join(found)


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
