"""Tables of random adapters in the memory of a device, for tests of their products."""

import torch

from blockyard.kernels.lora.adapter_table import OFFSETS, AdapterTable

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ERROR = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]


def make_table(
    ranks: list[list[int]], sizes: list[int], inputs: int, dtype: torch.dtype, *, bias: bool = False
) -> AdapterTable:
    """A table of adapters with these ranks, by place and part. bias: the last part of each place has one."""
    pieces, offsets, end = [torch.full((3,), float("nan"))], torch.full((len(ranks), len(sizes), OFFSETS), -1), 3
    for place, of_place in enumerate(ranks):
        for part, (rank, size) in enumerate(zip(of_place, sizes, strict=True)):
            wanted = [rank * inputs, size * rank, size if bias and part == len(sizes) - 1 else 0]
            for i, count in enumerate(wanted):
                if count:
                    offsets[place, part, i] = end
                    pieces.append(torch.randn(count) * (1 if i == 2 else inputs**-0.5 if i == 0 else 0.3))
                    end += count
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
    )
