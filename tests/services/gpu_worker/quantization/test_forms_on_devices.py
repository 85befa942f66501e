"""Every kept form on a GPU, against the same checkpoint on the CPU, whose logits are judged by `test_forms_in_use`.

Where inputs are rounded, a last bit before can move a rounding: such rows are compared by their mean error. Sums of
products in 8-bit floats have few more bits than their inputs on tensor cores, so that more of them move.
"""

from pathlib import Path

import pytest
import torch
from kept_forms import FORMS, MORE_FORMS
from quantized_checkpoint import check_logits, greedy_tokens, logits
from tiny_models import start

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
CASES = [
    *((name, model) for name in FORMS for model in ("llama", "mixtral", "deepseek-v2-lite")),
    *((name, "llama") for name in MORE_FORMS),
]
CASES.remove(("Table4A16", "deepseek-v2-lite"))  # its inputs are no multiple of 16


@pytest.mark.parametrize(("name", "model"), CASES)
def test_logits_in_float32(name: str, model: str, tmp_path: Path) -> None:
    sample = (FORMS | MORE_FORMS)[name]
    made = sample.write(tmp_path, model)
    if sample.round_inputs is None:
        runner = check_logits(made, device="cuda")
        assert greedy_tokens(runner) == greedy_tokens(start(made.packed, max_model_len=64))
    else:
        assert row_error(made.packed, dtype="float32") < (0.06 if name.startswith("Fp8") else 0.02)


@pytest.mark.parametrize(("name", "model"), [case for case in CASES if case[1] != "deepseek-v2-lite"])
def test_logits_in_bfloat16(name: str, model: str, tmp_path: Path) -> None:
    made = (FORMS | MORE_FORMS)[name].write(tmp_path, model)
    assert row_error(made.packed, dtype="bfloat16") < (0.16 if name.startswith("Fp8") else 0.08)


def row_error(folder: Path, dtype: str) -> float:
    """The median over rows of the error of their logits on a GPU, to the deviation of logits in float32 on the CPU."""
    expected = logits(start(folder, max_model_len=64))
    got = logits(start(folder, device="cuda", dtype=dtype, max_model_len=64)).float().to(expected.device)
    return float(((got - expected).square().mean(1).sqrt() / expected.std()).median())
