"""Tables of random adapters in the memory of a device, for tests of their products."""

from dataclasses import replace

import torch

from blockyard.kernels.lora.adapter_table import ALIGNED, OFFSETS, AdapterTable
from blockyard.kernels.lora.adapter_tokens import COLUMNS, AdapterTokens

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ERROR = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]


def make_table(
    ranks: list[list[int]], sizes: list[int], inputs: int, dtype: torch.dtype, *, bias: bool = False
) -> AdapterTable:
    """A table of adapters with these ranks, by place and part. bias: the last part of each place has one."""
    pieces, offsets = [torch.full((ALIGNED,), float("nan"))], torch.full((len(ranks), len(sizes), OFFSETS), -1)
    end = ALIGNED
    for place, of_place in enumerate(ranks):
        for part, (rank, size) in enumerate(zip(of_place, sizes, strict=True)):
            wanted = [rank * inputs, size * rank, size if bias and part == len(sizes) - 1 else 0]
            for i, count in enumerate(wanted):
                if count:
                    offsets[place, part, i] = end
                    pieces.append(torch.randn(count) * (1 if i == 2 else inputs**-0.5 if i == 0 else 0.3))
                    pieces.append(torch.full((-count % ALIGNED,), float("nan")))
                    end += count + -count % ALIGNED
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    most = max([1, *(rank for of_place in ranks for rank in of_place)])
    return AdapterTable(
        torch.cat(pieces).to(dtype).to(DEVICE),
        offsets.to(DEVICE),
        torch.tensor(ranks, dtype=torch.int32, device=DEVICE).view(len(ranks), len(sizes)),
        torch.tensor(starts, dtype=torch.int32, device=DEVICE),
        torch.tensor(sizes, dtype=torch.int32, device=DEVICE),
        max(sizes),
        most,
        is_wide=not any(size % ALIGNED for size in sizes),
    )


def in_places(table: AdapterTable, experts: int) -> AdapterTable:
    """The table of a layer with so many experts, as a part of a wider table. Places have memory of their own.

    table: with a place for each expert of each place.
    """
    places, parts = len(table.ranks) // experts, table.num_parts
    size = len(table.arena) + ALIGNED

    def wide(values: torch.Tensor) -> torch.Tensor:
        rows = values.reshape(places, experts * parts, *values.shape[2:])
        return torch.cat([torch.full_like(rows, 7), rows, rows[:, :1]], 1)[:, experts * parts : -1]

    arena, offsets = torch.nn.functional.pad(table.arena, (0, ALIGNED)).repeat(places), wide(table.offsets)
    offsets += torch.arange(places, device=DEVICE)[:, None, None] * size * (offsets >= 0)
    return replace(table, arena=arena, offsets=offsets, ranks=wide(table.ranks))


def make_tokens(
    tokens: list[list[int]], ranks: list[int], vocab_size: int, width: int, dtype: torch.dtype
) -> AdapterTokens:
    """Adapters with rows of their own for these tokens, and matrices of these ranks, by place."""
    size, most = 3 + (vocab_size + width) * max(ranks) + max(map(len, tokens)) * width, max(map(len, tokens)) + 1
    arena = torch.randn(len(tokens) * size) * 0.3
    ids, columns = torch.full((len(tokens), most), -1, dtype=torch.int32), torch.zeros(len(tokens), COLUMNS).long()
    for place, (own, rank) in enumerate(zip(tokens, ranks, strict=True)):
        ids[place, : len(own)] = torch.tensor(own, dtype=torch.int32)
        begin = place * size + 3
        a_at = begin + len(own) * width
        columns[place] = torch.tensor([len(own), begin, rank, a_at, a_at + vocab_size * rank])
    return AdapterTokens(arena.to(dtype).to(DEVICE), columns.to(DEVICE), ids.to(DEVICE))
