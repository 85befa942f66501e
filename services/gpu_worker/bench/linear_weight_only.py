"""Times the linear layers of Llama-3.1-8B with weights of 4 and 8 bits and inputs as they are."""

import torch

from blockyard.services.gpu_worker.bench.linear_8_bits import rows_of
from blockyard.services.gpu_worker.bench.row import Row
from blockyard.services.gpu_worker.quantization.kept.form import KeptForm
from blockyard.services.gpu_worker.quantization.kept.table4_a16 import NF4, Table4A16
from blockyard.services.gpu_worker.quantization.kept.w4a16 import W4A16
from blockyard.services.gpu_worker.quantization.kept.w8a16 import W8A16

FORMS: dict[str, KeptForm] = {
    "4 bits, groups of 128": W4A16(128),
    "4 bits, groups of 128, zeros": W4A16(128, torch.uint8),
    "nf4, groups of 64": Table4A16(NF4, 64),
    "8 bits, rows": W8A16(torch.int8),
}


def measure() -> list[Row]:
    """Times include the norm before each product. The rate counts the bytes of codes, scales and zeros."""
    with torch.inference_mode():
        return [one for name, form in FORMS.items() for one in rows_of(name, form, in_8_bits=False)]
