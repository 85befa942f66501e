"""The checksum of a KV block: 64 bits, a sum over layers, so that layers can be added in any order.

With w[i], the 64-bit little-endian words of a block in one layer, modulo 2**64:

    x[i]   = w[i] ^ (w[i] >> 31)
    piece  = sum over i of x[i] * multiplier[i]
    block  = sum over layers of mix(piece + salt[layer])

The multipliers are pseudo-random, so swapped words change a piece. The shift copies high bits to low positions:
without it a change of the highest bit of two words, such as two flipped signs, could cancel. `mix` is not linear and
each layer has its own salt, so swapped layers change the checksum. A change goes undetected with a probability of about
2**-32 if it is one high bit in each of two words, and of about 2**-64 otherwise.
This file has the reference, and imports no Triton. Tensors are int64, because int64 wraps as uint64 does.
"""

import functools

import torch
from torch import Tensor

SHIFT = 31
GOLDEN = 0x9E3779B97F4A7C15  # the three constants of splitmix64
MIX_1, MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MULTIPLIER_SEED, _SALT_SEED = 0x6B76626C6F636B00, 0x6C61796572730000


def mix(x: Tensor) -> Tensor:
    """The finalizer of splitmix64, elementwise over int64."""
    x = (x ^ _shift(x, 30)) * _signed(MIX_1)
    x = (x ^ _shift(x, 27)) * _signed(MIX_2)
    return x ^ _shift(x, 31)


@functools.cache
def multipliers(words: int) -> Tensor:
    """[words] int64, one for each word of a block in a layer."""
    return _splitmix(_MULTIPLIER_SEED, words)


@functools.cache
def salts(layers: int) -> Tensor:
    """[layers] int64, one for each layer."""
    return _splitmix(_SALT_SEED, layers)


def block_checksums_reference(memory: Tensor, block_ids: Tensor, layers: range) -> Tensor:
    """memory [all layers, num_blocks, words] int64, block_ids [n] -> [n] int64: the checksums' part over `layers`."""
    num_layers, _, words = memory.shape
    words_of = memory[layers.start : layers.stop, block_ids.long()]
    pieces = ((words_of ^ _shift(words_of, SHIFT)) * multipliers(words).to(memory.device)).sum(2)
    salt = salts(num_layers)[layers.start : layers.stop].to(memory.device)
    return mix(pieces + salt[:, None]).sum(0)


def _splitmix(seed: int, count: int) -> Tensor:
    return mix(torch.arange(1, count + 1, dtype=torch.int64) * _signed(GOLDEN) + seed)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Shifts right without sign extension."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
