"""Times the linear layers of an 8B with quantized weights, to those in bfloat16, by number of rows; on a GPU.

Each product is the fastest of the tuner's candidates alone, with the norm before it. The head is left out. With
--products there are no norms, and those in bfloat16 are cuBLAS's, so that little is compiled.

    python tests/bench/gpu_kernels/bench_quantized_linear.py --forms "w4 g128" "fp8 rows" --rows 1 64 2048
    python tests/bench/gpu_kernels/bench_quantized_linear.py --products --every --forms "w4 g128" --rows 16 64 256
"""

import argparse
import functools
from collections.abc import Sequence

import torch

from blockyard.services.gpu_worker.layers.linear import Linear, dense_linear, make_spec
from blockyard.services.gpu_worker.linear_tuning.kernel_configs import CUBLAS, KernelConfig
from blockyard.services.gpu_worker.linear_tuning.timing import replay_seconds
from blockyard.services.gpu_worker.linear_tuning.tuner import Tuner
from blockyard.services.gpu_worker.loading.linear_spec import part
from blockyard.services.gpu_worker.quantization.kept.form import KeptForm, KeptLinear, kinds
from blockyard.services.gpu_worker.quantization.kept.fp8_w8a8 import Fp8W8A8
from blockyard.services.gpu_worker.quantization.kept.int8_w8a8 import Int8W8A8
from blockyard.services.gpu_worker.quantization.kept.table4_a16 import E2M1, NF4, Table4A16
from blockyard.services.gpu_worker.quantization.kept.w4a16 import W4A16
from blockyard.services.gpu_worker.quantization.kept.w8a16 import W8A16
from blockyard.services.gpu_worker.quantization.method import Fusion

SHAPES = {  # outputs, inputs, what may be fused
    "qkv": (6144, 4096, Fusion.NORM),
    "out": (4096, 4096, Fusion.ADD),
    "gate_up": (28672, 4096, Fusion.NORM),
    "down": (4096, 14336, Fusion.GATED_ADD),
}
BF16 = "bf16"
FORMS: dict[str, KeptForm | None] = {
    BF16: None,
    "w4 g128": W4A16(128),
    "w4 g128 zeros": W4A16(128, torch.uint8),
    "nf4 g64": Table4A16(NF4, 64),
    "mxfp4": Table4A16(E2M1, 32, torch.float8_e8m0fnu),
    "w8 rows": W8A16(torch.int8),
    "fp8 rows": Fp8W8A8(),
    "fp8 blocks": Fp8W8A8(128),
    "int8": Int8W8A8(),
}
COPIES = 3  # of a layer, so that the L2 cache does not hold their weights
MOST_TUNED = 256  # rows


def make(form: KeptForm | None, outputs: int, inputs: int, fusion: Fusion) -> Linear:
    if form is None:
        weight = torch.randn(outputs, inputs, dtype=torch.bfloat16, device="cuda").mul_(0.02)
        return dense_linear(weight, None, fusion)
    kept = {
        name: torch.zeros(shape, dtype=dtype, device="cuda")
        for name, (shape, dtype) in kinds(form, outputs, inputs).items()
    }
    form.fill(kept, torch.Generator("cuda").manual_seed(1))
    linear = Linear(
        KeptLinear(form, kept, (inputs, outputs), torch.bfloat16), make_spec([part("", outputs)], inputs), fusion
    )
    linear.prepare()
    linear.ask_fusion(fusion)
    return linear


def describe(config: KernelConfig) -> str:
    if config == CUBLAS:
        return "default"
    tiles = (config.out_tile, config.row_tile, config.in_tile, config.stages, config.warps, config.split)
    return f"{config.kernel} {tiles}"


def product_seconds(tuner: Tuner, config: KernelConfig, group: Sequence[Linear], rows: int) -> float:
    """Seconds of one product without a norm, as the mean over layers of one shape."""
    calls = [tuner.timer.call(config, linear, rows, norms=False) for linear in group]

    def step() -> None:
        for call in calls:
            call()

    return replay_seconds(step) / len(calls)


def measure(
    form: KeptForm | None, rows: list[int], products: bool, every: bool
) -> dict[int, list[tuple[float, KernelConfig]]]:
    """The microseconds and the config of each shape, by number of rows."""
    tuner = Tuner(
        [make(form, *shape) for _ in range(COPIES) for shape in SHAPES.values()],
        device=torch.device("cuda"),
        dtype=torch.bfloat16,
    )
    if form is not None or not products:
        tuner.compile([num for num in rows if num <= MOST_TUNED])
    seconds = functools.partial(product_seconds, tuner) if products else tuner.timer.seconds
    found: dict[int, list[tuple[float, KernelConfig]]] = {}
    for num in rows:
        for layer, group in zip(tuner.layers, tuner.groups, strict=True):
            configs = [] if products and form is None else tuner.candidates(layer, num)
            if not products or not configs:
                configs = [CUBLAS, *configs]
            times = {config: 1e6 * seconds(config, group, num) for config in configs}
            best = min(times, key=lambda config: times[config])
            found.setdefault(num, []).append((times[best], best))
            for config, took in sorted(times.items(), key=lambda one: one[1]) if every else ():
                print(f"        {num} rows, {layer.out_features}: {took:.1f} us, {describe(config)}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--forms", nargs="+", default=[name for name in FORMS if name != BF16], choices=[*FORMS])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 16, 64, 128, 256, 2048])
    parser.add_argument("--products", action="store_true", help="without norms, and bfloat16 by cuBLAS")
    parser.add_argument("--every", action="store_true", help="prints each candidate")
    args = parser.parse_args()
    base: dict[int, list[tuple[float, KernelConfig]]] = {}
    with torch.inference_mode():
        for name in dict.fromkeys([BF16, *args.forms]):
            found = measure(FORMS[name], args.rows, args.products, args.every)
            base = base or found
            for rows, own in found.items():
                total, dense = (sum(took for took, _ in one) for one in (own, base[rows]))
                print(f"{name}, {rows} rows: {total:.0f} us a layer, {total / dense:.2f} of bf16", flush=True)
                for shape, (took, config), (plain, _) in zip(SHAPES, own, base[rows], strict=True):
                    print(f"    {shape}: {took:.1f} us, {took / plain:.2f}, {describe(config)}")


if __name__ == "__main__":
    main()
