"""The table of attention kernels. `choose` picks one by device, kind of row, KV dtype, layer and batch."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum

import torch

from blockyard.services.gpu_worker.kv.pool import KVPool
from blockyard.services.gpu_worker.layers.attention import AttentionShape
from blockyard.shared.errors import LoadError

FUSED_DECODE_MAX_ROWS = 1  # larger batches were not measured
FUSED_DECODE_MAX_LEN = 8192  # keys; at 16,384 separate kernels for rotation, attention and combining are faster
TRITON_MAX_HEAD_DIM = 512
TRITON_MAX_LATENT = 512
HOPPER_BLOCK_SIZES = frozenset({16, 32, 64})
HOPPER_ROW = (512, 64)  # latent and rotated numbers of a row: DeepSeek's
# by head size, the keys that a token has to attend to, or PAGED_PREFILL is quicker: an item takes 3 us more
HOPPER_PREFILL_MIN_KEYS = {64: 512, 128: 0, 256: 0}
FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
FLOATS_AND_FP8 = FLOATS | {torch.float8_e4m3fn, torch.float8_e5m2}
BFLOAT16 = frozenset({torch.bfloat16})  # float16 compiles in the Hopper kernels but has not run


class RowKind(Enum):
    DECODE = "decode"  # one new token of a sequence
    PREFILL = "prefill"  # several new tokens of a sequence


class AttentionKernel(Enum):
    TORCH_BATCH_INVARIANT = "torch_batch_invariant"  # batch_invariant_cpu.py: one product a row
    TORCH = "torch"  # cpu_attention.py: dense products over gathered K and V
    FUSED_DECODE = "fused_decode"  # rotation, KV write and attention in one kernel
    TRITON_BATCH_INVARIANT = "triton_batch_invariant"
    SPLIT_KV_DECODE = "split_kv_decode"
    PAGED_PREFILL_HOPPER = "paged_prefill_hopper"
    PAGED_PREFILL = "paged_prefill"
    LATENT_DECODE_HOPPER = "latent_decode_hopper"  # latent layers: absorbed up-projections, split-KV
    LATENT_DECODE = "latent_decode"  # the same
    LATENT_PREFILL = "latent_prefill"  # latent layers: decompressed K and V, piece by piece
    LATENT_BATCH_INVARIANT = "latent_batch_invariant"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCase:
    """The rows of one kind in a step, in layers of one kind, as arguments of `choose`."""

    device: str  # "cpu" or "cuda"
    kind: RowKind
    kv_dtype: torch.dtype
    layer: AttentionShape
    batch_invariant: bool = False
    block_size: int = 0  # of the cache on a GPU
    runs_hopper: bool = False  # see `gpu_facts.runs_hopper_kernels`
    decodes_only: bool = False  # all rows of the step are decodes and need logits
    num_rows: int = 0
    max_seq_len: int = 0

    @property
    def is_latent(self) -> bool:
        return self.layer.latent_dim is not None


@dataclass(frozen=True, slots=True)
class Entry:
    """A row of `TABLE`: a kernel and the cases that it supports."""

    kernel: AttentionKernel
    device: str
    kinds: frozenset[RowKind]
    kv_dtypes: frozenset[torch.dtype]
    fits: Callable[[AttentionCase], bool] = lambda case: True


BOTH = frozenset(RowKind)
DECODE, PREFILL = frozenset({RowKind.DECODE}), frozenset({RowKind.PREFILL})


def _is_latent_invariant(case: AttentionCase) -> bool:
    return case.is_latent and case.batch_invariant


def _fits_fused_decode(case: AttentionCase) -> bool:
    is_short = 0 < case.num_rows <= FUSED_DECODE_MAX_ROWS and case.max_seq_len <= FUSED_DECODE_MAX_LEN
    return case.decodes_only and is_short and not case.batch_invariant and not case.is_latent


def _fits_hopper_prefill(case: AttentionCase) -> bool:
    rules, min_keys = case.layer.rules, HOPPER_PREFILL_MIN_KEYS.get(case.layer.head_dim)
    slides = rules.window is None or not rules.chunked
    is_known = case.runs_hopper and min_keys is not None and case.block_size in HOPPER_BLOCK_SIZES
    return is_known and slides and rules.num_keys(case.max_seq_len) >= (min_keys or 0)


def _fits_hopper_latent(case: AttentionCase) -> bool:
    layer = case.layer
    is_row = layer.latent_dim is not None and (layer.latent_dim, layer.head_dim - layer.latent_dim) == HOPPER_ROW
    return case.runs_hopper and is_row and case.block_size in HOPPER_BLOCK_SIZES


# the first entry that fits is used
TABLE = (
    Entry(AttentionKernel.TORCH_BATCH_INVARIANT, "cpu", BOTH, FLOATS, lambda case: case.batch_invariant),
    Entry(AttentionKernel.TORCH, "cpu", BOTH, FLOATS),
    Entry(AttentionKernel.FUSED_DECODE, "cuda", DECODE, FLOATS_AND_FP8, _fits_fused_decode),
    Entry(AttentionKernel.LATENT_BATCH_INVARIANT, "cuda", BOTH, FLOATS_AND_FP8, _is_latent_invariant),
    Entry(AttentionKernel.LATENT_DECODE_HOPPER, "cuda", DECODE, BFLOAT16, _fits_hopper_latent),
    Entry(AttentionKernel.LATENT_DECODE, "cuda", DECODE, FLOATS_AND_FP8, lambda case: case.is_latent),
    Entry(AttentionKernel.LATENT_PREFILL, "cuda", PREFILL, FLOATS_AND_FP8, lambda case: case.is_latent),
    Entry(AttentionKernel.TRITON_BATCH_INVARIANT, "cuda", BOTH, FLOATS_AND_FP8, lambda case: case.batch_invariant),
    Entry(AttentionKernel.SPLIT_KV_DECODE, "cuda", DECODE, FLOATS_AND_FP8),
    Entry(AttentionKernel.PAGED_PREFILL_HOPPER, "cuda", PREFILL, BFLOAT16, _fits_hopper_prefill),
    Entry(AttentionKernel.PAGED_PREFILL, "cuda", PREFILL, FLOATS_AND_FP8),
)


def choose(case: AttentionCase) -> AttentionKernel:
    """Returns the first kernel in `TABLE` that supports the case. Raises LoadError if there is none."""
    for entry in TABLE:
        is_for = entry.device == case.device and case.kind in entry.kinds and case.kv_dtype in entry.kv_dtypes
        if is_for and entry.fits(case):
            return entry.kernel
    raise LoadError(f"no attention kernel for {case.kind.value} on {case.device} with a KV cache of {case.kv_dtype}")


def gpu_decodes(pool: KVPool, layer: AttentionShape, max_seq_len: int, runs_hopper: bool) -> AttentionCase:
    """The decodes of any step over a pool on a GPU, in layers of one kind. runs_hopper: see `AttentionCase`."""
    return AttentionCase(
        device="cuda",
        kind=RowKind.DECODE,
        kv_dtype=pool.dtype,
        batch_invariant=pool.batch_invariant,
        layer=layer,
        block_size=pool.block_size,
        runs_hopper=runs_hopper,
        max_seq_len=max_seq_len,
    )


def check_head_sizes(device: str, layers: Iterable[AttentionShape]) -> None:
    """Raises LoadError if the kernels of a device do not support the head sizes of a layer."""
    for shape in layers if device == "cuda" else ():
        if shape.latent_dim is not None:
            rotated = shape.head_dim - shape.latent_dim
            if rotated % 2 or shape.latent_dim > TRITON_MAX_LATENT:
                raise LoadError(
                    f"latent attention with rows of {shape.latent_dim} and {rotated} numbers is not supported on a "
                    f"GPU (kv_lora_rank, qk_rope_head_dim), only latents of up to {TRITON_MAX_LATENT} and even rotated "
                    "parts; --device cpu takes others"
                )
        elif shape.head_dim % 2 or shape.head_dim > TRITON_MAX_HEAD_DIM:
            raise LoadError(
                f"a head size of {shape.head_dim} is not supported on a GPU (head_dim), only even ones up to "
                f"{TRITON_MAX_HEAD_DIM} are; --device cpu takes others"
            )
