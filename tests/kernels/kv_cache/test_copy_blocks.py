"""The kernel against plain indexing and the reference checksums."""

import pytest
import torch

from blockyard.kernels.kv_cache.block_checksum import block_checksums_reference, multipliers, salts
from blockyard.kernels.kv_cache.block_checksum_triton import block_checksums
from blockyard.kernels.kv_cache.copy_blocks import copy_blocks, copy_blocks_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAYERS, BLOCKS = 3, 7


def random_memory(layers: int, blocks: int, words: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**63), 2**63 - 1, (layers, blocks, words), generator=generator).to(DEVICE)


def ids_of(*pairs: tuple[int, int]) -> torch.Tensor:
    return torch.tensor(pairs, dtype=torch.int32, device=DEVICE).view(-1, 2).T.contiguous()


@pytest.mark.parametrize("words", [1, 2, 100, 2048, 5000])
@pytest.mark.parametrize("programs", [1, 4, 100])
@pytest.mark.parametrize(
    ("num_layers", "first_source_layer", "first_target_layer"), [(LAYERS, 0, 0), (1, 2, 0), (2, 0, 3), (2, 1, 1)]
)
def test_blocks_and_checksums(
    words: int, programs: int, num_layers: int, first_source_layer: int, first_target_layer: int
) -> None:
    source, target = random_memory(LAYERS, BLOCKS, words, 1), random_memory(5, BLOCKS + 4, words, 2)
    ids, layers = ids_of((6, 0), (0, 10), (3, 4)), (num_layers, first_source_layer, first_target_layer)
    expected = target.clone()
    expected_sums = copy_blocks_reference(source, expected, ids, *layers)
    with_sums, sums = target.clone(), torch.full((num_layers, 3), 5, dtype=torch.int64, device=DEVICE)
    tables = (multipliers(words).to(DEVICE), salts(LAYERS).to(DEVICE), sums)
    copy_blocks(source, with_sums, ids, *layers, checksums=tables, programs=programs)
    assert torch.equal(with_sums, expected) and torch.equal(sums, expected_sums)
    copy_blocks(source, target, ids, *layers, programs=programs)
    assert torch.equal(target, expected)


def test_one_block_goes_to_two_places() -> None:
    source, target = random_memory(LAYERS, BLOCKS, 9, 1), random_memory(LAYERS, BLOCKS, 9, 2)
    copy_blocks(source, target, ids_of((4, 0), (4, 6)), LAYERS)
    assert torch.equal(target[:, 0], source[:, 4]) and torch.equal(target[:, 6], source[:, 4])


def test_nothing_to_copy_and_what_does_not_fit() -> None:
    memory, ids = random_memory(LAYERS, BLOCKS, 8, 1), ids_of((0, 1))
    before = memory.clone()
    copy_blocks(memory, memory, ids_of(), LAYERS)
    copy_blocks(memory, memory, ids, 0)
    assert copy_blocks_reference(memory, memory, ids, 0).shape == (0, 1)
    assert torch.equal(memory, before)
    with pytest.raises(ValueError, match="do not fit those"):
        copy_blocks(memory, memory, ids, LAYERS, 1)
    with pytest.raises(ValueError, match="do not fit those"):
        copy_blocks(memory, random_memory(LAYERS, BLOCKS, 4, 1), ids, LAYERS)
    with pytest.raises(ValueError, match="ids must be"):
        copy_blocks(memory, memory, ids[0], LAYERS)
    with pytest.raises(ValueError, match="contiguous"):
        copy_blocks(memory.transpose(0, 1), memory, ids, 1)
    tables = (
        multipliers(8).to(DEVICE),
        salts(LAYERS).to(DEVICE),
        torch.zeros((1, 2), dtype=torch.int64, device=DEVICE),
    )
    with pytest.raises(ValueError, match="1 blocks of 8 words"):
        copy_blocks(memory, memory, ids, LAYERS, checksums=tables)


@pytest.mark.parametrize("programs", [1, 100])
def test_some_heads_of_blocks(programs: int) -> None:
    """The second and third of four heads, in two planes, to the first and second of three, and to packed blocks."""
    words, ids = 100, ids_of((6, 0), (0, 10), (3, 4))
    source = random_memory(LAYERS, BLOCKS, 2 * 4 * words, 1).view(LAYERS, BLOCKS, 2, -1)[..., words : 3 * words]
    whole = random_memory(5, BLOCKS + 4, 2 * 3 * words, 2).view(5, BLOCKS + 4, 2, -1)
    packed = random_memory(5, BLOCKS + 4, 2 * 2 * words, 3).view(5, BLOCKS + 4, 2, -1)
    for target in (whole[..., : 2 * words], packed):
        others = whole[..., 2 * words :].clone()
        expected = target.clone()
        expected_sums = copy_blocks_reference(source, expected, ids, 2, 1, 0)
        sums = torch.zeros((2, 3), dtype=torch.int64, device=DEVICE)
        tables = (multipliers(4 * words).to(DEVICE), salts(LAYERS).to(DEVICE), sums)
        copy_blocks(source, target, ids, 2, 1, 0, checksums=tables, programs=programs)
        assert torch.equal(target, expected) and torch.equal(sums, expected_sums)
        assert torch.equal(whole[..., 2 * words :], others)
        again = torch.zeros_like(sums)
        block_checksums(target, ids[1].contiguous(), range(2), tables[0], salts(5).to(DEVICE), again)
        first = block_checksums_reference(target.flatten(2), ids[1], range(1))
        assert torch.equal(again[0], first)
    with pytest.raises(ValueError, match="must be contiguous, or some heads of them"):
        copy_blocks(source.transpose(0, 1), packed, ids, 1)
