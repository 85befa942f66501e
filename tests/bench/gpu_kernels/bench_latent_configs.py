"""Times tile sizes and launch options of the kernels of latent attention on a GPU, with DeepSeek's sizes.

`bench_latent_configs.py [decode] [prefill]` prints a line for each configuration, the fastest of a case first. The
choice is made in `choose_config` of `kernels/attention/latent/latent_decode.py` and `latent_prefill.py`.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from triton.errors import TritonError

from blockyard.kernels.attention.latent import latent_decode, latent_prefill
from blockyard.kernels.attention.latent.latent_decode import LatentDecodeConfig
from blockyard.kernels.attention.latent.latent_prefill import LatentPrefillConfig
from blockyard.services.gpu_worker.bench import latent
from blockyard.services.gpu_worker.bench.row import Row

FEW_HEADS = [  # heads, keys, warps, stages, programs
    LatentDecodeConfig(16, keys, warps, stages, programs)
    for keys, warps, stages, programs in (
        *((32, 4, 5, programs) for programs in (1, 2)),
        *((32, 8, 5, programs) for programs in (1, 2)),
        *((16, 4, 5, programs) for programs in (2, 3, 4)),
        *((16, 8, 7, programs) for programs in (1, 2)),
        (32, 4, 7, 1),
        (32, 8, 7, 1),
        (64, 4, 5, 1),
        (64, 8, 5, 1),
    )
]
MANY_HEADS = [
    *(LatentDecodeConfig(64, keys, 8, stages, 1) for keys, stages in ((32, 3), (32, 5), (64, 3), (16, 5), (16, 7))),
    LatentDecodeConfig(64, 32, 4, 5, 1),
    LatentDecodeConfig(32, 32, 8, 5, 1),
    LatentDecodeConfig(16, 32, 4, 5, 2),
]
PREFILL = [
    LatentPrefillConfig(*config)
    for config in (
        *((128, 64, 8, stages) for stages in (2, 3, 4)),
        *((128, 128, 8, stages) for stages in (2, 3)),
        *((128, 32, 8, stages) for stages in (3, 5)),
        *((64, 64, 4, stages) for stages in (2, 3)),
        *((64, 128, 4, stages) for stages in (2, 3)),
        (128, 64, 4, 3),
    )
]
Measure = Callable[[], Row]


def try_all(title: str, module: Any, configs: list[Any], measure: Measure) -> None:
    rows = []
    for config in configs:
        module.choose_config = lambda *_, config=config: config
        try:
            with torch.inference_mode(), torch.device("cuda"):
                rows.append((measure(), config))
        except (TritonError, RuntimeError) as e:  # too little shared memory
            print(f"{config}: {str(e).splitlines()[0][:100]}", file=sys.stderr)
            torch.cuda.empty_cache()
    print(f"{title}: {rows[0][0].shape if rows else 'nothing ran'}")
    for row, config in sorted(rows, key=lambda one: one[0].us)[:8]:
        print(f"  {row.us:8.1f} us  {row.rate:>14}  {row.ceiling_share:6.1%}  {config}", flush=True)


def main(names: list[str]) -> None:
    if not names or "decode" in names:
        latent.runs_hopper_kernels = lambda *_: False  # the configs are not of the kernel for Hopper GPUs
        for case in ((64, 4096, 16), (1, 32768, 16)):
            try_all("decode", latent_decode, FEW_HEADS, lambda case=case: latent._decode(*case))
        try_all("decode", latent_decode, MANY_HEADS, lambda: latent._decode(64, 4096, 128))
    if not names or "prefill" in names:
        try_all("prefill", latent_prefill, PREFILL, lambda: latent._prefill(0, 8192, 16))


if __name__ == "__main__":
    main(sys.argv[1:])
