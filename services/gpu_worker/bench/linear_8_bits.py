"""Times the linear layers of Llama-3.1-8B with weights and inputs of 8 bits: each shape, by default and as tuned."""

from collections.abc import Iterator

import torch

from blockyard.services.gpu_worker.bench.linear import SHAPES
from blockyard.services.gpu_worker.bench.row import Row, row
from blockyard.services.gpu_worker.layers.linear import Linear, make_spec
from blockyard.services.gpu_worker.linear_tuning.kernel_configs import CUBLAS, pick
from blockyard.services.gpu_worker.linear_tuning.tuner import Tuner
from blockyard.services.gpu_worker.loading.linear_spec import part
from blockyard.services.gpu_worker.quantization.kept.form import KeptForm, KeptLinear, kinds
from blockyard.services.gpu_worker.quantization.kept.fp8_w8a8 import Fp8W8A8
from blockyard.services.gpu_worker.quantization.kept.int8_w8a8 import Int8W8A8

FORMS: dict[str, KeptForm] = {"fp8 rows": Fp8W8A8(), "fp8 blocks": Fp8W8A8(128), "int8": Int8W8A8()}
COPIES = 4  # of each shape, so that the L2 cache does not hold their weights
ROWS = (1, 8, 64, 128, 256)
MANY_ROWS = 2048  # which are not tuned
NAMES = {
    "cublas": "default",
    "skinny": "rows in registers",
    "stream_k": "tensor cores",
    "blocks": "tensor cores",
    "mma": "tensor cores, weights in registers",
    "unpacked": "cuBLAS, unpacked first",
}


def measure() -> list[Row]:
    """Times include the norm before each product, which rounds its input."""
    with torch.inference_mode():
        return [one for name, form in FORMS.items() for one in rows_of(name, form)]


def rows_of(form_name: str, form: KeptForm, in_8_bits: bool = True) -> Iterator[Row]:
    """Each shape by default and as picked. in_8_bits: products are, and not in bfloat16."""
    linears = [_linear(form, *shape) for shape in SHAPES.values() for _ in range(COPIES)]
    tuner = Tuner(linears, device=torch.device("cuda"), dtype=torch.bfloat16)
    tuner.compile(ROWS)
    for num in (*ROWS, MANY_ROWS):
        for name, layer, group in zip(SHAPES, tuner.layers, tuner.groups, strict=True):
            configs = (CUBLAS, *tuner.candidates(layer, num))
            times = {config: tuner.timer.seconds(config, group, num) for config in configs}
            elements = layer.in_features * layer.out_features
            for config in dict.fromkeys((CUBLAS, pick(times))):
                label, shape = f"{form_name}, {name}, {NAMES[config.kernel]}", f"{num} x {layer.in_features} -> "
                yield row(
                    label,
                    f"{shape}{layer.out_features}",
                    times[config],
                    group[0].method.size_bytes,
                    2 * num * elements,
                    in_8_bits=in_8_bits,
                )


def _linear(form: KeptForm, outputs: int, inputs: int) -> Linear:
    kept = {
        name: torch.zeros(shape, dtype=dtype, device="cuda")
        for name, (shape, dtype) in kinds(form, outputs, inputs).items()
    }
    form.fill(kept, torch.Generator("cuda").manual_seed(1))
    made = Linear(KeptLinear(form, kept, (inputs, outputs), torch.bfloat16), make_spec([part("", outputs)], inputs))
    made.prepare()
    return made
