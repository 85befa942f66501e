"""The layout of KV blocks, which must be equal on both workers of a transfer."""

import math

import msgspec


class BlockLayout(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The shape, dtype and model of a KV block. Workers may differ in their number of blocks."""

    num_layers: int
    kv_heads: int
    head_dim: int
    block_size: int  # tokens
    dtype: str  # of the KV cache, for example "bfloat16"
    dtype_bytes: int
    scales: bytes = b""  # digest of the scales of an 8-bit KV cache
    scope: str = ""  # model, revision and KV dtype, as block hashes have it
    checksums: bool = True

    @property
    def piece_bytes(self) -> int:
        """Bytes of K and V of a block in one layer. They are contiguous."""
        return math.prod((2, self.kv_heads, self.head_dim, self.block_size, self.dtype_bytes))

    @property
    def block_bytes(self) -> int:
        return self.num_layers * self.piece_bytes


_WORDS = {
    "num_layers": "layers",
    "kv_heads": "KV heads",
    "head_dim": "head size",
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
    return str(value)
