"""The CPU's layout of 4-bit weights, which is undone for products of many rows."""

import pytest
import torch

from blockyard.services.gpu_worker.quantization.kept import host_w4
from blockyard.services.gpu_worker.quantization.kept.act_order import ORDER
from blockyard.services.gpu_worker.quantization.kept.form import KeptLinear
from blockyard.services.gpu_worker.quantization.kept.w4a16 import CODES, SCALES, W4A16, ZEROS, pack


@pytest.mark.parametrize("outputs", [16, 32, 48, 64, 80, 112, 128, 144, 272])
@pytest.mark.parametrize("inputs", [32, 96])
def test_what_torch_packs_is_unpacked(outputs: int, inputs: int) -> None:
    codes = torch.randint(0, 16, (outputs, inputs))
    packed = host_w4.pack(codes, torch.ones(outputs, 1), torch.full((outputs, 1), 8.0))
    assert torch.equal(host_w4.unpack(packed[host_w4.CODES], (outputs, inputs)).long(), codes)


@pytest.mark.parametrize("order", ["", "own"])
def test_a_weight_is_in_memory_once(order: str) -> None:
    """After `prepare`, products of few and of many rows read what torch has packed."""
    form = W4A16(32, torch.uint8, torch.float16, order)
    kept = {
        CODES: pack(torch.randint(0, 16, (48, 128))),
        SCALES: (torch.rand(48, 4) * 0.02).half(),
        ZEROS: torch.randint(0, 17, (48, 4), dtype=torch.uint8),
    }
    if order:
        kept[ORDER] = torch.randperm(128).int()
    want = form.dequantize(kept, 128, torch.float32)
    linear = KeptLinear(form, kept, (128, 48), torch.bfloat16)
    size = sum(one.nbytes for one in kept.values())
    linear.prepare()
    assert linear.size_bytes == sum(one.nbytes for one in linear.tensors().values()) < size * 1.2
    torch.testing.assert_close(linear.dequantized().float(), want, atol=2e-3, rtol=1e-2)
    x = torch.randn(host_w4.MOST_ROWS + 1, 128).bfloat16()
    few, many = linear.apply(x[:5]), linear.apply(x)
    torch.testing.assert_close(few, many[:5], atol=0.05, rtol=0.02)
    torch.testing.assert_close(many.float(), x.float() @ want.t(), atol=0.05, rtol=0.02)
