"""What weights of every kept form do alike: products are those of the numbers, and each expert has its own."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from blockyard.services.gpu_worker.quantization.kept.form import KeptExperts, KeptForm, KeptLinear


def check_numbers(form: KeptForm, kept: Mapping[str, Tensor], numbers: Tensor) -> None:
    """numbers: [outputs, inputs] float32, that the kept tensors mean."""
    outputs, inputs = numbers.shape
    torch.testing.assert_close(form.dequantize(kept, inputs, torch.float32), numbers)
    x, bias = torch.randn(3, inputs), torch.randn(outputs)
    linear = KeptLinear(form, kept, (inputs, outputs), torch.float32, bias)
    torch.testing.assert_close(linear.apply(x), F.linear(x, numbers, bias))
    linear.prepare()
    torch.testing.assert_close(linear.apply(x), F.linear(x, numbers, bias))


def check_experts(form: KeptForm, kept: Mapping[str, Tensor], inputs: int, outputs: int) -> None:
    """kept: with a leading dimension of experts."""
    experts = KeptExperts(form, kept, (inputs, outputs), torch.float32)
    for expert in range(len(kept["codes"])):
        own = {name: value[expert] for name, value in kept.items()}
        torch.testing.assert_close(experts.linear(expert).dequantized(), form.dequantize(own, inputs, torch.float32))
