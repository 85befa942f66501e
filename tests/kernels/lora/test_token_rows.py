"""Rows of embedding and head that adapters have, against the references: no rows, no matrices, rows without adapter."""

from pathlib import Path

import pytest
import torch
from adapter_tables import DEVICE, DTYPES, ERROR, make_tokens
from compile_for_hopper import shared_bytes

from blockyard.kernels.lora.adapt_embeddings import adapt_embeddings
from blockyard.kernels.lora.adapter_tokens import adapt_embeddings_reference, replace_logits_reference
from blockyard.kernels.lora.replace_logits import replace_logits

VOCAB = 300
MANY = list(range(3, 300))  # more than a program compares at once
TOKENS, RANKS = [[5, 17, 299], [], MANY, []], [0, 3, 18, 0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 130])
@pytest.mark.parametrize("places", [[0, 0, -1, 1, 2, 2, 3], [-1], []], ids=str)
def test_embeddings(places: list[int], width: int, dtype: torch.dtype) -> None:
    table = make_tokens(TOKENS, RANKS, VOCAB, width, dtype)
    chosen = torch.tensor(places, dtype=torch.int32, device=DEVICE)
    token_ids = torch.tensor([17, 4, 5, 5, 298, 2, 17], device=DEVICE)[: len(places)]
    wide = torch.randn(len(places), width + 3, device=DEVICE).to(dtype)
    found, want, before = wide[:, 1:-2], wide.clone()[:, 1:-2], wide.clone()
    adapt_embeddings(found, token_ids, chosen, table)
    adapt_embeddings_reference(want, token_ids, chosen, table)
    assert torch.equal(wide[:, [0, -2, -1]], before[:, [0, -2, -1]]), "nothing beside the rows is written"
    torch.testing.assert_close(found, want, rtol=ERROR[dtype], atol=2 * ERROR[dtype])
    changed = [row for row in range(len(places)) if not torch.equal(found[row], before[row, 1:-2])]
    assert changed == [row for row in (0, 3, 4, 5) if row < len(places) > 1]
    if changed:
        at = 3 + width  # the second row of place 0, which has no matrices
        assert torch.equal(found[0], table.arena[at : at + width])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 300])
@pytest.mark.parametrize("places", [[0, -1, 1, 2, 0], [-1], []], ids=str)
def test_logits(places: list[int], width: int, dtype: torch.dtype) -> None:
    table = make_tokens(TOKENS, RANKS, VOCAB, width, dtype)
    chosen = torch.tensor(places, dtype=torch.int32, device=DEVICE)
    x = torch.randn(len(places), width + 1, device=DEVICE).to(dtype)[:, 1:]
    wide = torch.randn(len(places), VOCAB + 2, device=DEVICE).to(dtype)
    out, want, before = wide[:, 1:-1], wide.clone()[:, 1:-1], wide.clone()
    replace_logits(x, chosen, table, out)
    replace_logits_reference(x, chosen, table, want)
    torch.testing.assert_close(out, want, rtol=ERROR[dtype], atol=4 * ERROR[dtype])
    is_kept = torch.ones_like(wide, dtype=torch.bool)
    for row, place in enumerate(places):
        is_kept[row, [token + 1 for token in TOKENS[place]] if place >= 0 else []] = False
    assert torch.equal(wide[is_kept], before[is_kept]), "no other logit is written"
    assert not bool((wide == before)[~is_kept].all()) or bool(is_kept.all())


def test_what_does_not_fit_is_refused() -> None:
    table = make_tokens([[1]], [2], 8, 16, torch.float32)
    rows, ids = torch.randn(2, 16, device=DEVICE), torch.zeros(2, dtype=torch.int64, device=DEVICE)
    places = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    for found, tokens, chosen in ((rows, ids.int(), places), (rows, ids, places[:1]), (rows.T, ids, places)):
        with pytest.raises(ValueError):
            adapt_embeddings(found, tokens, chosen, table)
    for x, chosen, out in ((rows, places.long(), rows), (rows[:1], places, rows), (rows, places, rows[:1])):
        with pytest.raises(ValueError):
            replace_logits(x, chosen, table, out)


LAUNCHES = """
from blockyard.kernels.lora import adapt_embeddings, replace_logits
from blockyard.kernels.lora.adapter_tokens import AdapterTokens

adapt_embeddings.supports_pdl = replace_logits.supports_pdl = lambda device: True
ints = lambda *shape: torch.zeros(*shape, dtype=torch.int32)
table = AdapterTokens(torch.zeros(64).bfloat16(), torch.zeros(8, 5).long(), ints(8, 512))
x, logits = torch.zeros(64, 4096).bfloat16(), torch.zeros(64, 128512).bfloat16()
adapt_embeddings.adapt_embeddings(x, torch.zeros(64).long(), ints(64), table)
replace_logits.replace_logits(x, ints(64), table, logits)
"""


def test_sizes_of_an_8b_model_compile_for_an_h100(tmp_path: Path) -> None:
    names = {name for name, _ in shared_bytes(LAUNCHES, tmp_path)}
    assert names == {"adapt_embeddings_kernel", "replace_logits_kernel"}
