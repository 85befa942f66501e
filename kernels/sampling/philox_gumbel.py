"""Gumbel noise as a pure function of (seed, choice, index of the new token in its sequence, token id).

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011). Key: the request's 64-bit seed,
low word first. Counter: (token_id // 4, index, choice, 0); of the four words that come out, token_id % 4 picks one.
So a sampled token does not depend on batch, slot, worker, preemption or restart.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

PhiloxWords = npt.NDArray[np.uint64]

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF
_ROUNDS = 10


def philox4x32(counter: Tensor, key: Tensor) -> Tensor:
    """counter [4, ...], key [2, ...] (broadcast against each other), int64 words below 2**32 -> words [4, ...].

    int64 products wrap, which leaves their low 64 bits right; the words are cut out of them by shift and mask.
    """
    shape = np.broadcast_shapes(counter.shape[1:], key.shape[1:])  # torch's imports sympy: 2.3 s of a start
    multipliers = torch.tensor([_M0, _M1], device=counter.device).view(2, *[1] * len(shape))
    steps = torch.tensor([_W0, _W1], device=counter.device).view(2, *[1] * (key.ndim - 1))
    even = counter[0::2].expand(2, *shape)  # words 0 and 2: multiplied
    odd = counter[1::2].expand(2, *shape)  # words 1 and 3: mixed in
    for _ in range(_ROUNDS):
        product = even * multipliers
        # the high half of word 2's product meets word 1, that of word 0's product meets word 3
        even = ((product >> 32) & _MASK).flip(0).bitwise_xor_(odd).bitwise_xor_(key)
        odd = product.bitwise_and_(_MASK).flip(0)
        key = (key + steps) & _MASK
    return torch.stack((even[0], odd[0], even[1], odd[1]))


def to_gumbel(words: Tensor) -> Tensor:
    """32-bit words (int64) -> float32 noise -log(-log(u)) with u = 1 - v, v = (word + 0.5) / 2**32.

    Taking the logarithm of 1 - v keeps float32 exact where the noise is large, at small v.
    """
    v = words.to(torch.float32).add_(0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24)
    return v.neg_().log1p_().neg_().log_().neg_()


def split_seed(seed: int) -> tuple[int, int]:
    """A 64-bit seed as the two words of the Philox key."""
    return seed & _MASK, (seed >> 32) & _MASK


def gumbel_rows(key: Tensor, index: Tensor, choice: Tensor, vocab_size: int) -> Tensor:
    """Noise of all tokens: key [2, rows], index [rows], choice [rows], int64 -> [rows, vocab_size] float32."""
    groups = torch.arange((vocab_size + 3) // 4, device=index.device)
    words = _words(key, index, choice, groups[None])
    return to_gumbel(words).permute(1, 2, 0).reshape(index.shape[0], -1)[:, :vocab_size]


def gumbel_at(key: Tensor, index: Tensor, choice: Tensor, token_ids: Tensor) -> Tensor:
    """Noise of some tokens: token_ids [rows, n] -> [rows, n] float32. Same values as `gumbel_rows`."""
    words = _words(key, index, choice, token_ids >> 2)
    return to_gumbel(words.gather(0, (token_ids & 3)[None])[0])


def _words(key: Tensor, index: Tensor, choice: Tensor, groups: Tensor) -> Tensor:
    """key [2, rows], index [rows], choice [rows], groups [rows or 1, n] -> [4, rows, n]."""
    size = (index.shape[0], groups.shape[1])
    counter = (groups, index[:, None], choice[:, None], index.new_zeros(()))
    if key.device.type != "cpu":
        return philox4x32(torch.stack([c.expand(size) for c in counter]), key[:, :, None])
    even, odd = np.empty((2, *size), np.uint64), np.empty((2, *size), np.uint64)
    for i, word in enumerate(counter):
        (odd if i % 2 else even)[i // 2] = word.numpy()
    words = philox4x32_numpy(even, odd, key.numpy().view(np.uint64)[:, :, None])
    return torch.from_numpy(words.view(np.int64))


def philox4x32_numpy(even: PhiloxWords, odd: PhiloxWords, key: PhiloxWords) -> PhiloxWords:
    """`philox4x32` in half its time on CPU: unsigned shifts need no mask, and a reversed view costs nothing.

    even, odd [2, ...]: words 0 and 2, and words 1 and 3, of the counter; both are overwritten.
    """
    ones = (1,) * (key.ndim - 1)
    multipliers = np.array([_M0, _M1], np.uint64).reshape(2, *ones)
    rounds = np.arange(_ROUNDS, dtype=np.uint64).reshape(_ROUNDS, 1, *ones)
    mask, shift = np.uint64(_MASK), np.uint64(32)
    keys = (key + rounds * np.array([_W0, _W1], np.uint64).reshape(2, *ones)) & mask
    product, high = np.empty_like(even), np.empty_like(even)
    product_flipped, high_flipped = product[::-1], high[::-1]
    for round_key in keys:
        np.multiply(even, multipliers, out=product)
        np.right_shift(product, shift, out=high)
        np.bitwise_xor(high_flipped, odd, out=even)
        np.bitwise_xor(even, round_key, out=even)
        np.bitwise_and(product_flipped, mask, out=odd)
    return np.stack((even[0], odd[0], even[1], odd[1]))
