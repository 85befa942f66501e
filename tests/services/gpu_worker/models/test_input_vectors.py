"""Steps with vectors in place of token ids, against transformers with the same embeddings."""

from pathlib import Path

import numpy as np
import pytest
import torch
from model_logits import all_logits
from tiny_models import BY_NAME, VOCAB, start

DEVICES = [pytest.param("cpu", marks=pytest.mark.cpu), pytest.param("cuda", marks=pytest.mark.cuda)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("name", "model_impl"),
    [("llama", "auto"), ("gemma3", "auto"), ("gpt2", "auto"), ("llama", "transformers"), ("qwen2", "transformers")],
)
def test_vectors_take_the_place_of_embeddings(device: str, name: str, model_impl: str, tmp_path: Path) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    theirs = BY_NAME[name].save(tmp_path).to(device)
    ours = start(tmp_path, device=device, model_impl=model_impl)
    rng = np.random.default_rng(6)
    ids, places = rng.integers(2, VOCAB, 60).tolist(), [0, 3, 4, 5, 31, 59]
    with torch.no_grad():
        embedded = theirs.get_input_embeddings()(torch.tensor([ids], device=device)).clone()
        own = {at: embedded[0, at].clone() for at in places}
        plain = theirs(torch.tensor([ids], device=device)).logits[0]
        others = {at: torch.randn_like(embedded[0, at]) * embedded.std() for at in places}
        for at, vector in others.items():
            embedded[0, at] = vector
        changed = theirs(inputs_embeds=embedded).logits[0]
    assert float((plain - changed).abs().max()) > 0.1
    hidden_ids = [1 if at in places else token for at, token in enumerate(ids)]  # what the vectors hide does not matter
    for vectors, expected in ((own, plain), (others, changed)):
        for chunks in ([60], [1, 2, 1, 1, 26, 1, 28]):
            difference = float((all_logits(ours, hidden_ids, chunks, vectors) - expected).abs().max())
            assert difference <= 1e-4, f"largest difference {difference}"
