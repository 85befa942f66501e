"""Which kernel computes a linear layer for a number of rows: what there is to try, and which of it was best.

Plain functions over numbers, and the file that keeps what was measured. What measures is `linear_tuning`.
"""

import logging
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

log = logging.getLogger(__name__)

CACHE_VERSION = 4  # of the candidates below: a file of another one is measured anew
MARGIN = 0.98  # of the library's time, to be taken in its place: less is noise
REFINE_MARGIN = 0.997  # of a few layers' time, to be taken beside the others
NUM_TRIES = 3
MAX_ROWS = 256  # beyond it products are bound by arithmetic, which the library does best
SHARED_BYTES = 226 << 10  # a program's at most, on compute capability 9.0
FETCH_ELEMENTS = 1 << 26  # a weight below it is over so soon that its first bytes are worth asking for early
FEWEST_STEPS = 3  # of a part of a tile
CAPABILITY = (9, 0)  # of the GPUs that the defaults were measured on
DEFAULTS = Path(__file__).with_name("default_configs.json")

# out_tile, tile, tiles before its turn, warps by rows
SKINNY_TILES = {
    1: ((4, 512, 2, 2), (4, 1024, 2, 4), (8, 512, 2, 4), (8, 1024, 1, 4), (8, 1024, 3, 8), (4, 1024, 3, 4),
        (4, 2048, 1, 4), (4, 2048, 2, 4), (1, 4096, 1, 4), (8, 512, 1, 4), (2, 1024, 1, 1), (1, 2048, 1, 1),
        (1, 1024, 3, 1)),
    2: ((4, 512, 1, 2), (4, 1024, 1, 4), (2, 2048, 1, 4), (4, 512, 2, 2), (4, 1024, 3, 4)),
    4: ((2, 1024, 1, 4), (4, 1024, 1, 4), (2, 512, 1, 2), (2, 1024, 3, 4)),
}  # fmt: skip
# out_tile, row_tile, in_tile, stages, warps by the most rows they are for
STREAM_K_TILES = {
    16: ((64, 16, 128, 5, 4), (64, 16, 256, 5, 4), (128, 16, 128, 3, 4)),
    32: ((64, 32, 128, 5, 4), (64, 32, 128, 8, 4), (128, 32, 128, 3, 4), (128, 32, 128, 5, 4)),
    64: ((64, 64, 128, 6, 4), (128, 64, 64, 4, 4), (64, 64, 128, 3, 4), (64, 64, 64, 8, 4)),
    128: ((64, 64, 128, 6, 4), (128, 128, 64, 3, 4), (64, 128, 64, 8, 4), (128, 128, 64, 6, 8)),
    256: ((128, 128, 64, 6, 8), (64, 128, 64, 8, 4), (128, 256, 64, 4, 8), (128, 128, 64, 3, 4)),
}
BATCH_INVARIANT = (128, 64, 64, 4, 4)


class KernelConfig(msgspec.Struct, frozen=True, omit_defaults=True):
    """How one product is computed."""

    kernel: Literal["library", "few", "tiles"] = "library"
    out_tile: int = 0
    row_tile: int = 0
    in_tile: int = 0
    stages: int = 0  # tiles on their way; of few rows, before its turn
    warps: int = 0
    split: int = 1  # parts of a tile's sum
    fetch: int = 0  # cache lines of each output's weights asked for before the kernel's turn


LIBRARY = KernelConfig()


class LinearShape(msgspec.Struct, frozen=True, order=True):
    """Linear layers of one shape."""

    ins: int
    outs: int
    count: int


class TunedConfig(msgspec.Struct, frozen=True):
    """What was measured once for all layers of a model: one plan a layer."""

    layers: list[LinearShape]
    dtype: str
    rows: int
    plans: list[KernelConfig]


class TunedConfigFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file."""

    edition: int
    choices: list[TunedConfig]


def candidates(layer: LinearShape, rows: int, element_bytes: int, processors: int) -> list[KernelConfig]:
    """What is worth measuring beside the library; nothing for types and shapes that the kernels do not take."""
    if rows > MAX_ROWS or element_bytes != 2 or layer.ins * element_bytes % 16:
        return []
    plans = [
        KernelConfig("few", out, 0, size, early, warps)
        for out, size, early, warps in SKINNY_TILES.get(rows, ())
        if size * early <= 2 * layer.ins
    ]
    if rows > 1:
        for shape in STREAM_K_TILES[next(most for most in STREAM_K_TILES if rows <= most)]:
            plans += [_tiles(layer, shape, split) for split in splits(layer, rows, shape, element_bytes, processors)]
    return plans


def splits(
    layer: LinearShape, rows: int, shape: tuple[int, int, int, int, int], element_bytes: int, processors: int
) -> list[int]:
    """None; and in so many parts that the programs that run at a time are all busy, or half as many."""
    out_tile, row_tile, in_tile, stages, _ = shape
    tiles = -(-layer.outs // out_tile) * -(-rows // row_tile)
    together = processors * max(SHARED_BYTES // ((out_tile + row_tile) * in_tile * element_bytes * stages), 1)
    most = max(min(together // tiles, layer.ins // in_tile // FEWEST_STEPS), 1)
    return sorted({1, most, max(most // 2, 1)})


def batch_invariant_config(layer: LinearShape, element_bytes: int, processors: int) -> KernelConfig:
    """The one of a layer under --batch-invariant, for any number of rows; the library's: the kernels do not take it."""
    if element_bytes != 2 or layer.ins * element_bytes % 16:
        return LIBRARY
    out_tile, _, in_tile, _, _ = BATCH_INVARIANT
    split = max(min(round(processors / -(-layer.outs // out_tile)), layer.ins // in_tile // FEWEST_STEPS), 1)
    return _tiles(layer, BATCH_INVARIANT, split)


def _tiles(layer: LinearShape, shape: tuple[int, int, int, int, int], split: int) -> KernelConfig:
    fetch = 4 if layer.ins * layer.outs <= FETCH_ELEMENTS else 0
    return KernelConfig("tiles", *shape, split, fetch)


class DefaultConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was quickest for one shape on the GPUs of CAPABILITY."""

    ins: int
    outs: int
    rows: int
    plan: KernelConfig


def read_defaults(path: Path = DEFAULTS) -> list[DefaultConfig]:
    """The plans that are shipped; `blockyard tune` measures those of a model."""
    return msgspec.json.decode(path.read_bytes(), type=list[DefaultConfig])


def default_config(
    measured: Sequence[DefaultConfig], layer: LinearShape, rows: int, possible: Sequence[KernelConfig]
) -> KernelConfig:
    """The plan of the most similar shape and number of rows, as far as it is among `possible`; else the library's."""

    def distance(one: DefaultConfig) -> float:
        return (
            abs(math.log(one.ins / layer.ins)) + abs(math.log(one.outs / layer.outs)) + abs(math.log(one.rows / rows))
        )

    nearest = min((one for one in measured if (one.rows > 1) == (rows > 1)), key=distance, default=None)
    if nearest is None:
        return LIBRARY
    same = [plan for plan in possible if _unsplit(plan) == _unsplit(nearest.plan)]
    return min(same, key=lambda plan: abs(plan.split - nearest.plan.split), default=LIBRARY)


def _unsplit(plan: KernelConfig) -> KernelConfig:
    """`fetch` follows from the shape, `split` from the shape and the GPU."""
    return msgspec.structs.replace(plan, split=1, fetch=0)


def pick(times: Mapping[KernelConfig, float]) -> KernelConfig:
    """The quickest; the library unless another is clearly quicker. `times` has the library's."""
    quickest = min(times, key=lambda plan: times[plan])
    return quickest if times[quickest] < MARGIN * times[LIBRARY] else LIBRARY


def fastest_own(times: Mapping[KernelConfig, float]) -> KernelConfig:
    """The quickest but the library, which is taken where there is no other."""
    others = [plan for plan in times if plan != LIBRARY]
    return min(others, key=lambda plan: times[plan]) if others else LIBRARY


def distinct(sets: Sequence[list[KernelConfig]]) -> list[list[KernelConfig]]:
    return [plans for i, plans in enumerate(sets) if plans not in sets[:i]]


def next_best(times: Mapping[KernelConfig, float], taken: KernelConfig) -> list[KernelConfig]:
    """What else to try: the next quickest, and the library."""
    others = sorted((plan for plan in times if plan != taken), key=lambda plan: times[plan])
    return list(dict.fromkeys([*others[:NUM_TRIES], *(plan for plan in others if plan == LIBRARY)]))


def fastest_set(times: Sequence[tuple[Sequence[KernelConfig], float]]) -> list[KernelConfig]:
    """Of ways to compute all layers of a step, the first being the library alone: the quickest, as `pick` would."""
    plans, took = min(times, key=lambda one: one[1])
    return list(plans if took < MARGIN * times[0][1] else times[0][0])


def table_path(
    device: str, versions: Sequence[str], folder: Path | None = None, environ: Mapping[str, str] = os.environ
) -> Path:
    """Of a kind of GPU under the versions of what compiles for it, in `folder` or the user's cache."""
    base = folder or Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "blockyard"
    name = re.sub(r"[^A-Za-z0-9.+]+", "-", "-".join((device, *versions)))
    return base / f"linear-{name}.json"


def read_table(path: Path) -> list[TunedConfig]:
    """Nothing where there is no file of this edition that can be read."""
    try:
        measured = msgspec.json.decode(path.read_bytes(), type=TunedConfigFile)
    except FileNotFoundError:
        return []
    except (OSError, msgspec.MsgspecError) as e:
        log.warning("%s cannot be used, linear layers are measured anew: %s", path, e)
        return []
    return measured.choices if measured.edition == CACHE_VERSION else []


def write_table(path: Path, choices: Sequence[TunedConfig]) -> None:
    """Whole or not at all. A folder that cannot be written to costs the next start its time, no more."""
    whole = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        whole.write_bytes(
            msgspec.json.format(msgspec.json.encode(TunedConfigFile(CACHE_VERSION, list(choices))), indent=1)
        )
        whole.replace(path)
    except OSError as e:
        log.warning("%s cannot be written, the next start measures linear layers again: %s", path, e)


def merge(old: Sequence[TunedConfig], new: Sequence[TunedConfig]) -> list[TunedConfig]:
    """The new ones, and the old ones of other models and rows."""
    keys = {_key(choice) for choice in new}
    return [*(choice for choice in old if _key(choice) not in keys), *new]


def find(choices: Sequence[TunedConfig], layers: list[LinearShape], dtype: str, rows: int) -> list[KernelConfig] | None:
    wanted = (tuple(layers), dtype, rows)
    return next((c.plans for c in choices if _key(c) == wanted and len(c.plans) == len(layers)), None)


def _key(choice: TunedConfig) -> tuple[tuple[LinearShape, ...], str, int]:
    return tuple(choice.layers), choice.dtype, choice.rows
