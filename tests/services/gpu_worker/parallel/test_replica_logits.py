"""Mixtures whose experts are spread over replicas, which are processes: each computes the logits of transformers.

Again after experts have moved between all ranks. With an adapter of layers that each replica has, those of PEFT.
"""

from pathlib import Path

import pytest
import replica_logits
import torch
from peft_adapters import peft_logits, save_adapter
from rank_logits import ADAPTER, prompt
from tiny_models import BY_NAME

MIXTURES = ("gpt-oss", "llama4", "gemma4-moe", "deepseek-v3")
FEW_CHOSEN = ("mixtral", "gpt-oss")  # 2 and 3 experts of a row
# of attention, also where K and V are never made, and of the embedding
ADAPTED = {
    "mixtral": ["q_proj", "o_proj"],
    "gpt-oss": ["k_proj", "embed_tokens"],
    "deepseek-v3": ["kv_b_proj", "o_proj"],
}


@pytest.mark.parametrize(
    ("num_replicas", "size", "names", "adapted"),
    [(2, 2, MIXTURES, ("deepseek-v3",)), (4, 1, FEW_CHOSEN, ("mixtral", "gpt-oss"))],
)
def test_each_replica_computes_its_own_rows(
    num_replicas: int, size: int, names: tuple[str, ...], adapted: tuple[str, ...], tmp_path: Path
) -> None:
    """Two replicas gather all rows. With four, more than a row has experts, each row is sent only where it must go."""
    expected = {}
    for name in names:
        theirs = BY_NAME[name].save(tmp_path / name)
        with torch.no_grad():
            expected[name] = theirs(torch.tensor([prompt()])).logits[0]
    for name in adapted:
        folder = tmp_path / f"{name}-adapted"
        peft = save_adapter(BY_NAME[name].save(folder), folder / ADAPTER, target_modules=ADAPTED[name])
        expected[folder.name] = peft_logits(peft, prompt())
        assert float((expected[folder.name] - expected[name]).abs().max()) > 0.01
    replica_logits.run(num_replicas, size, tmp_path / "group", [tmp_path / name for name in expected])
    for name, logits in expected.items():
        for replica in range(num_replicas):
            for moved in (False, True):
                got = torch.load(tmp_path / name / replica_logits.output(replica, moved=moved))
                assert float((got - logits).abs().max()) <= 1e-4, (name, replica, moved)
