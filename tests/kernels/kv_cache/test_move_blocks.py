"""Gathering and scattering blocks, compared with plain indexing."""

import pytest
import torch

from blockyard.kernels.kv_cache.move_blocks import (
    gather_blocks,
    gather_blocks_reference,
    scatter_blocks,
    scatter_blocks_reference,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("words", [1, 100, 5000])
@pytest.mark.parametrize("ids", [[3], [4, 0, 2]])
def test_gathered_blocks_scatter_back(words: int, ids: list[int]) -> None:
    torch.manual_seed(0)
    memory = torch.randint(-(2**31), 2**31 - 1, (2, 5, words), dtype=torch.int32, device=DEVICE)
    block_ids = torch.tensor(ids, dtype=torch.int32, device=DEVICE)
    packed, expected = torch.zeros((2, len(ids), 2, words), dtype=torch.int32, device=DEVICE).unbind()
    gather_blocks(memory, block_ids, packed)
    gather_blocks_reference(memory, block_ids, expected)
    assert torch.equal(packed, expected)
    moved, wanted = memory.clone(), memory.clone()
    turned = block_ids.flip(0).contiguous()
    scatter_blocks(moved, turned, packed)
    scatter_blocks_reference(wanted, turned, packed)
    assert torch.equal(moved, wanted)


def test_nothing_to_move_and_what_does_not_fit() -> None:
    memory = torch.zeros((2, 5, 8), dtype=torch.int32, device=DEVICE)
    none = torch.zeros(0, dtype=torch.int32, device=DEVICE)
    gather_blocks(memory, none, memory.new_empty((0, 2, 8)))
    with pytest.raises(ValueError, match="does not fit 0 blocks"):
        gather_blocks(memory, none, memory.new_empty((1, 2, 8)))
    with pytest.raises(ValueError, match="contiguous"):
        scatter_blocks(memory.transpose(0, 1).contiguous().transpose(0, 1), none, memory.new_empty((0, 2, 8)))
