"""RMSNorm's weight, as the checkpoint has it and with unit offset; norms over the heads of q, k and v."""

import pytest
import torch
from torch import Tensor

from blockyard.kernels.layers.apply_rope import apply_rope_reference, interleave_pairs
from blockyard.kernels.layers.rms_norm import RMSNorm
from blockyard.services.gpu_worker.layers.norm import head_l2_norm, head_rms_norm, make_rms_norm
from blockyard.services.gpu_worker.loading.linear_spec import Rows
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


def normalised(x: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


@pytest.mark.parametrize("unit_offset", [False, True])
@pytest.mark.parametrize("with_values", [False, True])
def test_norms_of_heads(with_values: bool, unit_offset: bool) -> None:
    """Weights of q and k in the order of rotated pairs, v without a weight."""
    table = WeightTable(torch.float32, torch.device("cpu"))
    make = head_rms_norm(0.1, unit_offset, with_values=with_values)
    norm = make(table, "attn", Rows(12, 3, 2), Rows(8, 2), lambda rows: interleave_pairs(rows, 4))
    stored = {"q": torch.tensor([1.0, 2.0, 3.0, 4.0]), "k": torch.tensor([0.5, 0.25, 2.0, 1.0])}
    for name, weight in stored.items():
        table.put(f"attn.{name}_norm.weight", weight - float(unit_offset))
    table.check_complete()
    norm.prepare()
    assert isinstance(norm, RMSNorm)
    x = torch.randn(5, 7 if with_values else 5, 4)
    weights = [stored["q"][[0, 2, 1, 3]]] * 3 + [stored["k"][[0, 2, 1, 3]]] * 2 + [torch.ones(4)] * 2
    torch.testing.assert_close(norm(x), normalised(x, 0.1) * torch.stack(weights[: x.shape[1]]))


def test_an_l2_norm_before_the_rotation_is_as_behind_it() -> None:
    norm = head_l2_norm(0.1)(
        WeightTable(torch.float32, torch.device("cpu")), "attn", Rows(24, 3, 2), Rows(16, 2), torch.clone
    )
    norm.prepare()
    assert isinstance(norm, RMSNorm)
    x, angles = torch.randn(4, 5, 8), torch.polar(torch.ones(4, 1, 4), torch.randn(4, 1, 4))
    before, behind = norm(x), x.clone()
    apply_rope_reference(before, angles)
    apply_rope_reference(behind, angles)
    torch.testing.assert_close(before, normalised(behind, 0.1))
