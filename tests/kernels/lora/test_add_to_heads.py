"""Adapters of absorbed up-projections against the reference, and against K and V that are made."""

from pathlib import Path

import pytest
import torch
from adapter_tables import DEVICE, DTYPES, ERROR, make_table
from compile_for_hopper import shared_bytes

from blockyard.kernels.lora.adapter_table import add_adapters_reference
from blockyard.kernels.lora.add_to_heads import add_to_heads, add_to_heads_reference

HEADS, PLAIN, VALUE, LATENT = 3, 12, 10, 24
RANKS = [[1], [40], [0]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("places", [[0], [-1, 1, 0, 2, 1], [2, -1], []], ids=str)
@pytest.mark.parametrize("values", [False, True])
def test_against_the_reference(places: list[int], dtype: torch.dtype, *, values: bool) -> None:
    table = make_table(RANKS, [HEADS * (PLAIN + VALUE)], LATENT, dtype, bias=True)
    sizes = (LATENT, VALUE) if values else (PLAIN, LATENT)
    x = torch.randn(len(places), HEADS, sizes[0] + 8, device=DEVICE).to(dtype)[..., : sizes[0]]
    out = torch.randn(len(places), HEADS, sizes[1], device=DEVICE).to(dtype)
    chosen, before, want = torch.tensor(places, dtype=torch.int32, device=DEVICE), out.clone(), out.clone()
    add_to_heads(x, chosen, table, PLAIN, out, values=values)
    add_to_heads_reference(x, chosen, table, PLAIN, want, values=values)
    assert torch.equal(out[chosen < 0], before[chosen < 0]), "rows without an adapter keep their bits"
    error = float((out.double() - want.double()).norm() / want.double().norm().clamp_min(1e-12))
    assert error <= ERROR[dtype], f"relative error {error}"
    assert torch.equal(out, before) == all(place < 0 or (place == 2 and not values) for place in places)


def test_scores_and_outputs_are_those_of_keys_and_values_that_are_made() -> None:
    """The terms of one adapter by their definition: K and V are the products of the latents."""
    width, tokens = PLAIN + VALUE, 7
    table = make_table([[5]], [HEADS * width], LATENT, torch.float32)
    query, latents = torch.randn(1, HEADS, PLAIN, device=DEVICE), torch.randn(tokens, LATENT, device=DEVICE)
    both = torch.zeros(tokens, HEADS * width, device=DEVICE)
    add_adapters_reference(latents, torch.zeros(tokens, dtype=torch.int32, device=DEVICE), table, both)
    of_heads, one = both.view(tokens, HEADS, width), torch.zeros(1, dtype=torch.int32, device=DEVICE)
    absorbed, out = query.new_zeros(1, HEADS, LATENT), query.new_zeros(1, HEADS, VALUE)
    add_to_heads(query, one, table, PLAIN, absorbed, values=False)
    scores = torch.einsum("hp,thp->ht", query[0], of_heads[..., :PLAIN])
    assert torch.allclose(absorbed[0] @ latents.T, scores, atol=1e-4)
    p = scores.softmax(1)
    add_to_heads((p @ latents)[None], one, table, PLAIN, out, values=True)
    assert torch.allclose(out[0], torch.einsum("ht,thv->hv", p, of_heads[..., PLAIN:]), atol=1e-4)


def test_what_does_not_fit_is_refused() -> None:
    table = make_table([[4]], [HEADS * (PLAIN + VALUE)], LATENT, torch.float32)
    places = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    query, out = torch.randn(2, HEADS, PLAIN, device=DEVICE), torch.randn(2, HEADS, LATENT, device=DEVICE)
    for x, chosen, to in (
        (query, places.long(), out),
        (query[:1], places, out),
        (query[..., 1:], places, out),
        (query[:, 1:], places, out),
    ):
        with pytest.raises(ValueError):
            add_to_heads(x, chosen, table, PLAIN, to, values=False)


LAUNCHES = """
from blockyard.kernels.lora import add_to_heads as file
from blockyard.kernels.lora.adapter_table import AdapterTable

file.supports_pdl = lambda device: True
ints = lambda *shape: torch.zeros(*shape, dtype=torch.int32)
arena, offsets = torch.zeros(64).bfloat16(), torch.zeros(8, 1, 3).long()
table = AdapterTable(arena, offsets, ints(8, 1), ints(1), ints(1), 128 * 256, 512)
query, latent = torch.zeros(64, 128, 128).bfloat16(), torch.zeros(64, 128, 512).bfloat16()
file.add_to_heads(query, ints(64), table, 128, latent, values=False)
file.add_to_heads(latent, ints(64), table, 128, query, values=True)
"""


def test_sizes_of_deepseek_v3_compile_for_an_h100(tmp_path: Path) -> None:
    assert {name for name, _ in shared_bytes(LAUNCHES, tmp_path)} == {"add_to_heads_kernel"}
