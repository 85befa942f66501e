"""Times latent attention of one row between two linear layers on a GPU: one kernel (`fused_latent_decode`), and kernels
of their own.

`bench_fused_latent.py [keys ...]` prints a line for each shape of heads and number of keys (KEYS if none is given).
`bench_fused_latent.py configs [keys ...]` prints the fastest configs of the kernel with V2-Lite's heads. `one_row` says
what is timed.
"""

import itertools
import sys
from dataclasses import dataclass
from functools import partial

import torch
from gpu_kernels.one_row import (
    BLOCK_SIZE,
    DEVICE,
    HEADER,
    KEYS,
    LONGEST,
    layer_us,
    num_blocks,
    num_layers,
    one_sequence,
    product,
    random_rotation,
    random_weights,
)
from torch import Tensor
from triton.errors import TritonError

from blockyard.kernels.attention.fused_decode import SplitSemaphores
from blockyard.kernels.attention.latent.fused_latent_decode import FusedLatentConfig, fused_latent_decode
from blockyard.kernels.attention.latent.head_products import head_products
from blockyard.kernels.attention.latent.latent_decode import latent_decode, schedule_latent_decode
from blockyard.kernels.attention.latent.write_latent import write_latent

LATENT, ROTATED = 512, 64
CONFIGS = [
    FusedLatentConfig(min_keys, keys, warps, up_rows)
    for min_keys, keys, warps, up_rows in itertools.product((32, 64, 128), (2, 4), (4, 8, 16), (32, 64, 128))
]


@dataclass(frozen=True, slots=True)
class Shape:
    """A layer of a model, whose query comes from the hidden state."""

    name: str
    heads: int
    plain: int
    value: int
    hidden: int


V2_LITE = Shape("DeepSeek-V2-Lite", 16, 128, 128, 2048)
SHAPES = (V2_LITE, Shape("GLM-4.7-Flash", 20, 192, 256, 2048), Shape("128 heads of DeepSeek-V3", 128, 128, 128, 2048))


class Chain:
    """Layers of a product, attention and a product."""

    def __init__(self, shape: Shape, keys: int) -> None:
        heads, hidden, self.shape = shape.heads, shape.hidden, shape
        width = heads * (shape.plain + ROTATED) + LATENT + ROTATED
        weights = hidden * (width + heads * shape.value) + heads * (shape.plain + shape.value) * LATENT
        num = num_layers(weights)
        self.seqs = one_sequence(keys)
        self.layers = [random_weights(num_blocks(keys), 1, 1, BLOCK_SIZE, LATENT + ROTATED) for _ in range(num)]
        self.first = [random_weights(width, hidden) * hidden**-0.5 for _ in range(num)]
        self.ups = [random_weights(heads, shape.plain + shape.value, LATENT) * LATENT**-0.5 for _ in range(num)]
        self.out = [random_weights(hidden, heads * shape.value) * (heads * shape.value) ** -0.5 for _ in range(num)]
        self.rotation = random_rotation(ROTATED)
        self.norm = random_weights(LATENT).abs() + 0.5
        self.x, self.mixed = random_weights(1, hidden), random_weights(1, heads * shape.value)
        self.semaphores = SplitSemaphores(heads, DEVICE)
        q_latent = random_weights(1, heads, LATENT)
        self.schedule = schedule_latent_decode(q_latent, self.layers[0], self.seqs, LONGEST)
        self.config = FusedLatentConfig()

    def attend(self, way: str, first: Tensor, up: Tensor, layer: Tensor) -> Tensor:
        plain, heads = self.shape.plain, self.shape.heads
        if way == "none":
            return self.mixed
        scale = (plain + ROTATED) ** -0.5
        query = first[:, : -LATENT - ROTATED].view(1, heads, plain + ROTATED)
        rows, norm = first[:, -LATENT - ROTATED :], (self.norm, 1e-6)
        if way == "fused":
            options = (up, scale, LONGEST, self.semaphores)
            return fused_latent_decode(
                query, rows, layer, self.seqs, self.rotation, *norm, *options, config=self.config
            )
        write_latent(query, rows, layer, self.seqs, self.rotation, *norm)
        q_latent = head_products(query[..., :plain], up[:, :plain])
        attended = latent_decode(q_latent, query[..., plain:], layer, self.seqs, scale, LONGEST, schedule=self.schedule)
        return head_products(attended, up[:, plain:].mT).flatten(1)

    def run(self, way: str) -> Tensor:
        x = self.x
        for first, up, out, layer in zip(self.first, self.ups, self.out, self.layers, strict=True):
            x = product(self.attend(way, product(x, first), up, layer), out)
        return x

    def layer_us(self, way: str) -> float:
        return layer_us(partial(self.run, way), len(self.layers))


def try_configs(numbers: list[int]) -> None:
    for keys in numbers:
        chain, rows = Chain(V2_LITE, keys), []
        alone = chain.layer_us("none")
        for chain.config in CONFIGS:
            try:
                rows.append((chain.layer_us("fused") - alone, chain.config))
            except (TritonError, RuntimeError) as e:  # too little shared memory
                print(f"{chain.config}: {str(e).splitlines()[0][:100]}", file=sys.stderr)
        print(f"{V2_LITE.name}, {keys:,} keys")
        for us, config in sorted(rows, key=lambda one: one[0])[:8]:
            print(f"  {us:6.1f} us  {config}", flush=True)


@torch.inference_mode()
def main(arguments: list[str]) -> None:
    numbers = [int(one) for one in arguments if one.isdigit()] or list(KEYS)
    if "configs" in arguments:
        try_configs(numbers)
        return
    print(HEADER)
    for shape in SHAPES:
        for keys in numbers:
            chain = Chain(shape, keys)
            alone, fused, apart = (chain.layer_us(way) for way in ("none", "fused", "apart"))
            heads = f"{shape.heads} of {shape.plain} + {ROTATED} and {shape.value} ({shape.name})"
            print(f"| {heads} | {keys:,} | {fused - alone:.1f} | {apart - alone:.1f} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
