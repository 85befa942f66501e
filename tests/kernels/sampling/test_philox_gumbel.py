"""The generator against its published vectors, and the noise drawn with it."""

import math

import numpy as np
import pytest
import torch

from blockyard.kernels.sampling.philox_gumbel import (
    gumbel_at,
    gumbel_rows,
    philox4x32,
    philox4x32_numpy,
    split_seed,
    to_gumbel,
)

# bounds of what `to_gumbel` can return: v is at least 2**-33 and at most 1 - 2**-24
GUMBEL_MAX, GUMBEL_MIN = 22.88, -2.82
# kat_vectors of Random123 (D. E. Shaw Research), philox4x32 with 10 rounds: counter, key, result
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN)
def test_known_answers(counter: str, key: str, result: str) -> None:
    assert philox4x32(torch.tensor(words(counter)), torch.tensor(words(key))).tolist() == words(result)


def test_the_fast_cpu_path_gives_the_same_words() -> None:
    counter = torch.randint(0, 2**32, (4, 50), generator=torch.Generator().manual_seed(1))
    key = torch.randint(0, 2**32, (2, 50), generator=torch.Generator().manual_seed(2))
    even, odd, both = (t.numpy().astype(np.uint64) for t in (counter[0::2], counter[1::2], key))
    assert philox4x32_numpy(even, odd, both).tolist() == philox4x32(counter, key).tolist()


def test_rows_and_single_tokens_agree() -> None:
    vocab_size = 1003  # not a multiple of the four words of a counter
    seeds = [0, 7, 2**64 - 1]
    key = torch.tensor([split_seed(s) for s in seeds]).T
    index, choice = torch.tensor([0, 5, 131071]), torch.tensor([0, 3, 1])
    rows = gumbel_rows(key, index, choice, vocab_size)
    assert rows.shape == (3, vocab_size)
    for r in range(3):
        ids = torch.tensor([0, 1, 2, 3, 4, 501, 1002])
        single = gumbel_at(key[:, r : r + 1], index[r : r + 1], choice[r : r + 1], ids[None])
        assert torch.equal(single[0], rows[r, ids])
    ids = torch.tensor([[5, 9], [9, 1000], [0, 5]])
    assert torch.equal(gumbel_at(key, index, choice, ids), rows.gather(1, ids))


def test_the_counter_is_the_one_that_is_documented() -> None:
    seed, index, choice, token = 0x123456789ABCDEF0, 77, 2, 4 * 19 + 3
    words_out = philox4x32(torch.tensor([19, index, choice, 0]), torch.tensor([0x9ABCDEF0, 0x12345678]))
    key = torch.tensor([split_seed(seed)]).T
    rows = gumbel_rows(key, torch.tensor([index]), torch.tensor([choice]), 100)
    assert rows[0, token] == to_gumbel(words_out[3])


def test_every_part_of_the_key_and_counter_matters() -> None:
    def row(seed: int, index: int, choice: int) -> torch.Tensor:
        return gumbel_rows(torch.tensor([split_seed(seed)]).T, torch.tensor([index]), torch.tensor([choice]), 64)[0]

    base = row(1, 2, 0)
    for other in (row(2, 2, 0), row(1 + 2**32, 2, 0), row(1, 3, 0), row(1, 2, 1)):
        assert not torch.isclose(base, other).any()


def test_bounds_and_accuracy() -> None:
    exact = [0, 1, 2, 1000, 2**31, 2**32 - 1000, 2**32 - 1]
    got = to_gumbel(torch.tensor(exact))
    assert torch.isfinite(got).all()
    assert float(got.max()) <= GUMBEL_MAX
    assert float(got.min()) >= GUMBEL_MIN
    for word, value in zip(exact[:-2], got.tolist(), strict=False):  # the top words are cut at 1 - 2**-24
        assert value == pytest.approx(-math.log(-math.log1p(-(word + 0.5) / 2**32)), abs=1e-5)


def test_it_is_gumbel_distributed() -> None:
    rows = 64
    key = torch.tensor([split_seed(s) for s in range(rows)]).T
    noise = gumbel_rows(key, torch.zeros(rows).long(), torch.zeros(rows).long(), 4096).double()
    cdf = torch.exp(-torch.exp(-noise.flatten().sort().values))
    batch_invariant = (torch.arange(len(cdf)) + 0.5) / len(cdf)
    assert float((cdf - batch_invariant).abs().max()) < 0.004  # Kolmogorov-Smirnov, 262,144 draws: p well under 1e-3
