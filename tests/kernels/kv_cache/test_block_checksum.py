"""The kernel against the reference, and what the checksum finds."""

import pytest
import torch

from blockyard.kernels.kv_cache.block_checksum import block_checksums_reference, multipliers, salts
from blockyard.kernels.kv_cache.block_checksum_triton import block_checksums

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAYERS, BLOCKS = 3, 5


def random_memory(words: int) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randint(-(2**63), 2**63 - 1, (LAYERS, BLOCKS, words), dtype=torch.int64, device=DEVICE)


def sums_of(memory: torch.Tensor, ids: list[int], layers: range, sums: torch.Tensor | None = None) -> torch.Tensor:
    """[n]: the sum over layers."""
    if sums is None:
        sums = torch.full((len(layers), len(ids)), 77, dtype=torch.int64, device=DEVICE)
    block_ids = torch.tensor(ids, dtype=torch.int32, device=DEVICE)
    block_checksums(memory, block_ids, layers, multipliers(memory.shape[2]).to(DEVICE), salts(LAYERS).to(DEVICE), sums)
    return sums.sum(0)


@pytest.mark.parametrize("words", [1, 100, 1024, 3000])
@pytest.mark.parametrize("ids", [[3], [4, 0, 2], []])
def test_the_kernel_is_the_reference(words: int, ids: list[int]) -> None:
    memory = random_memory(words)
    memory[1, 2] = 0
    expected = block_checksums_reference(memory, torch.tensor(ids, device=DEVICE), range(LAYERS))
    assert torch.equal(sums_of(memory, ids, range(LAYERS)), expected)


def test_layers_add_up() -> None:
    memory, ids = random_memory(60), [1, 4]
    parts = [sums_of(memory, ids, layers) for layers in (range(2, 3), range(0, 0), range(0, 2))]
    assert torch.equal(torch.stack(parts).sum(0), sums_of(memory, ids, range(LAYERS)))


def flipped_signs(memory: torch.Tensor) -> None:
    memory[0, 0, [7, 8]] ^= -(2**63)


def flipped_signs_of_all_halves(memory: torch.Tensor) -> None:
    memory[0, 0, [7, 8]] ^= -(2**63) | 1 << 47 | 1 << 31 | 1 << 15


def one_bit(memory: torch.Tensor) -> None:
    memory[2, 0, 59] ^= 1 << 62


def swapped_words(memory: torch.Tensor) -> None:
    memory[1, 0, [3, 4]] = memory[1, 0, [4, 3]]


def swapped_layers(memory: torch.Tensor) -> None:
    memory[[0, 1], 0] = memory[[1, 0], 0]


def partly_written(memory: torch.Tensor) -> None:
    memory[2, 0, 30:] = 0


def stale(memory: torch.Tensor) -> None:
    memory[:, 0] = memory[:, 1]


def one_stale_layer(memory: torch.Tensor) -> None:
    memory[1, 0] = memory[1, 1]


@pytest.mark.parametrize(
    "harm",
    [
        flipped_signs,
        flipped_signs_of_all_halves,
        one_bit,
        swapped_words,
        swapped_layers,
        partly_written,
        stale,
        one_stale_layer,
    ],
)
def test_harm_is_found(harm: "object") -> None:
    memory = random_memory(60)
    before = sums_of(memory, [0, 1], range(LAYERS))
    harm(memory)
    after = sums_of(memory, [0, 1], range(LAYERS))
    assert before[0] != after[0]
    assert before[1] == after[1]


def test_zeros_have_checksums_that_depend_on_the_layer() -> None:
    memory = torch.zeros((LAYERS, 1, 8), dtype=torch.int64, device=DEVICE)
    parts = {int(sums_of(memory, [0], range(layer, layer + 1))[0]) for layer in range(LAYERS)}
    assert len(parts) == LAYERS and 0 not in parts


def test_shapes_that_do_not_fit() -> None:
    memory = random_memory(8)
    with pytest.raises(ValueError, match="do not fit 3 layers"):
        sums_of(memory, [0], range(4))
    with pytest.raises(ValueError, match="do not fit blocks of 8 words"):
        sums_of(memory, [0], range(1), torch.zeros((1, 2), dtype=torch.int64, device=DEVICE))
    with pytest.raises(ValueError, match="contiguous"):
        sums_of(memory.transpose(0, 1), [0], range(1))
