"""Mixtures whose experts are spread over replicas, which are processes: each computes the logits of transformers."""

from pathlib import Path

import pytest
import replica_logits
import torch
from rank_logits import prompt
from tiny_models import BY_NAME

MIXTURES = ("gpt-oss", "llama4", "gemma4-moe", "deepseek-v3")
FEW_CHOSEN = ("mixtral", "gpt-oss")  # 2 and 3 experts of a row


@pytest.mark.parametrize(("num_replicas", "size", "names"), [(2, 2, MIXTURES), (4, 1, FEW_CHOSEN)])
def test_each_replica_computes_its_own_rows(
    num_replicas: int, size: int, names: tuple[str, ...], tmp_path: Path
) -> None:
    """Two replicas gather all rows. With four, more than a row has experts, each row is sent only where it must go."""
    expected = {}
    for name in names:
        theirs = BY_NAME[name].save(tmp_path / name)
        with torch.no_grad():
            expected[name] = theirs(torch.tensor([prompt()])).logits[0]
    replica_logits.run(num_replicas, size, tmp_path / "group", [tmp_path / name for name in names])
    for name in names:
        for replica in range(num_replicas):
            got = torch.load(tmp_path / name / replica_logits.output(replica))
            assert float((got - expected[name]).abs().max()) <= 1e-4, (name, replica)
