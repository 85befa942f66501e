"""Times tile sizes and launch options of attention with heads of 256 and 512 numbers on a GPU, with Gemma 4's sizes.

`bench_large_heads.py [decode] [prefill]` prints a line for each configuration, the fastest of a case first. The choice
is made in `choose_config` of `kernels/attention/paged_prefill.py`, and in `kernels/attention/paged_decode.py`.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from triton.errors import TritonError

from blockyard.kernels.attention import paged_decode, paged_prefill
from blockyard.kernels.attention.paged_prefill import PrefillConfig
from blockyard.services.gpu_worker.bench import attention
from blockyard.services.gpu_worker.bench.row import Row

NEAR, WIDE = attention.GEMMA[1:]
PREFILL = {  # rows of a query tile, keys, warps, stages, programs
    NEAR: [
        PrefillConfig(*config)
        for config in ((64, 32, 4, 2, 2), (64, 64, 4, 2, 1), (128, 64, 8, 2, 1), (128, 32, 8, 2, 1), (128, 32, 8, 3, 1))
    ],
    WIDE: [
        PrefillConfig(*config)
        for config in ((64, 32, 8, 2, 1), (64, 16, 8, 2, 1), (64, 64, 8, 1, 1), (32, 32, 4, 2, 2), (64, 32, 8, 1, 1))
    ],
}
DECODE = [  # keys, programs of a multiprocessor, registers of a lane of all warps, stages
    *((16, programs, 2048 // programs, stages) for programs in (4, 2) for stages in (2, 3)),
    (32, 2, 1024, 2),
    (32, 1, 1020, 3),
    (64, 1, 1020, 1),
    (16, 3, 672, 2),
    (16, 6, 320, 2),
]


def try_all(title: str, configs: Sequence[Any], use: Callable[[Any], None], measure: Callable[[], Row]) -> None:
    """Times every configuration; one that needs too much shared memory is named and left out."""
    rows = []
    for config in configs:
        use(config)
        try:
            with torch.inference_mode():
                rows.append((measure(), config))
        except (TritonError, RuntimeError) as e:
            print(f"{config}: {str(e).splitlines()[0][:100]}", file=sys.stderr)
            torch.cuda.empty_cache()
    print(f"{title}: {rows[0][0].shape if rows else 'nothing ran'}")
    for row, config in sorted(rows, key=lambda one: one[0].us):
        print(f"  {row.us:8.1f} us  {row.rate:>14}  {row.ceiling_share:6.1%}  {config}", flush=True)


def use_prefill(config: PrefillConfig) -> None:
    """For the Triton kernel, also where the one for Hopper GPUs supports the head size."""
    vars(attention)["runs_hopper_kernels"] = lambda *_: False
    vars(paged_prefill)["choose_config"] = lambda *_: config


def use_decode(config: tuple[int, int, int, int]) -> None:
    keys, programs, registers, stages = config
    constants = {"_PROGRAMS": programs, "_REGISTERS": registers, "_STAGES": stages, "_tile": lambda *_: keys}
    vars(paged_decode).update(constants)


def main(names: list[str]) -> None:
    if not names or "decode" in names:
        for shape in (WIDE, NEAR):
            for case in ("1 x 8,000", "64 x 1,024"):
                lengths = attention.DECODES[case]
                try_all("decode", DECODE, use_decode, partial(attention.decode_row, case, lengths, shape=shape))
    if not names or "prefill" in names:
        for shape, configs in PREFILL.items():
            for case in ("2,048", "8,192"):
                spans = attention.PREFILLS[case]
                try_all("prefill", configs, use_prefill, partial(attention.prefill_row, case, spans, shape))


if __name__ == "__main__":
    main(sys.argv[1:])
