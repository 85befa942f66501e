"""RMSNorm's weight, as the checkpoint has it and with unit offset."""

import pytest
import torch

from blockyard.services.gpu_worker.layers.norm import make_rms_norm
from blockyard.services.gpu_worker.loading.weights import WeightTable

STORED = torch.tensor([0.0, -0.5, 1.0, 2**-12], dtype=torch.bfloat16)  # 1 + 2**-12 is not a bfloat16


@pytest.mark.parametrize(
    ("unit_offset", "dtype", "weight"),
    [
        (False, torch.bfloat16, [0.0, -0.5, 1.0, 2**-12]),
        (True, torch.float32, [1.0, 0.5, 2.0, 1 + 2**-12]),  # in float32, because bfloat16 would round
    ],
)
def test_weight_with_and_without_unit_offset(unit_offset: bool, dtype: torch.dtype, weight: list[float]) -> None:
    table = WeightTable(torch.bfloat16, torch.device("cpu"))
    norm = make_rms_norm(table, "model.norm", 4, 1e-6, unit_offset)
    table.put("model.norm.weight", STORED)
    table.check_complete()
    assert norm.weight.dtype == dtype
    assert norm.weight.tolist() == weight
    assert table.size_bytes == norm.weight.nbytes
    norm.prepare()
    x = torch.randn(3, 4).bfloat16()
    want = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * torch.tensor(weight).double()
    assert norm(x).dtype == torch.bfloat16
    torch.testing.assert_close(norm(x).double(), want, rtol=2**-8, atol=0)
