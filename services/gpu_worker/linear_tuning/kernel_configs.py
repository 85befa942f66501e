"""Kernel configs of linear layers: the candidates for a shape, the choice among timings, and the cache file.

These are functions of numbers, without torch. `tuner` measures the candidates.
"""

import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from blockyard.services.gpu_worker.layers.moe.expert_configs import ExpertConfig, ExpertShape
from blockyard.shared.measured_file import read_measured, write_measured

Config = TypeVar("Config", bound=msgspec.Struct)
Tiles = TypeVar("Tiles")

MEASURED = "linear layers"
CACHE_VERSION = 13  # of the candidates and fields below; a cache file of another version is ignored
MARGIN = 0.98  # a kernel replaces the default one below this share of its time; a smaller gain is noise
REFINE_MARGIN = 0.997  # a change of one shape is kept below this share of the excerpt's time
NUM_TRIES = 3  # alternatives to try for one shape in `Tuner._refine`, beside cuBLAS
MAX_ROWS = 256  # larger GEMMs are compute-bound, and cuBLAS is fastest
SHARED_BYTES = 226 << 10  # usable shared memory of one SM, compute capability 9.0
FETCH_ELEMENTS = 1 << 26  # only a smaller weight is read so quickly that prefetching its first bytes pays off
FEWEST_STEPS = 3  # fewest steps of `in_tile` elements in each part of a split tile
CAPABILITY = (9, 0)  # compute capability of the GPUs that the defaults were measured on
DEFAULTS = Path(__file__).with_name("default_configs.json")

# rows -> candidates: out_tile, in_tile, tiles loaded before the PDL wait, warps
SKINNY_TILES = {
    1: ((4, 512, 2, 2), (4, 1024, 2, 4), (8, 512, 2, 4), (8, 1024, 1, 4), (8, 1024, 3, 8), (4, 1024, 3, 4),
        (4, 2048, 1, 4), (4, 2048, 2, 4), (1, 4096, 1, 4), (8, 512, 1, 4), (2, 1024, 1, 1), (1, 2048, 1, 1),
        (1, 1024, 3, 1)),
    2: ((4, 512, 1, 2), (4, 1024, 1, 4), (2, 2048, 1, 4), (4, 512, 2, 2), (4, 1024, 3, 4)),
    4: ((2, 1024, 1, 4), (4, 1024, 1, 4), (2, 512, 1, 2), (2, 1024, 3, 4)),
}  # fmt: skip
# most rows -> candidates: out_tile, row_tile, in_tile, stages, warps
STREAM_K_TILES = {
    16: ((64, 16, 128, 5, 4), (64, 16, 256, 5, 4), (128, 16, 128, 3, 4)),
    32: ((64, 32, 128, 5, 4), (64, 32, 128, 8, 4), (128, 32, 128, 3, 4), (128, 32, 128, 5, 4)),
    64: ((64, 64, 128, 6, 4), (128, 64, 64, 4, 4), (64, 64, 128, 3, 4), (64, 64, 64, 8, 4)),
    128: ((64, 64, 128, 6, 4), (128, 128, 64, 3, 4), (64, 128, 64, 8, 4), (128, 128, 64, 6, 8)),
    256: ((128, 128, 64, 6, 8), (64, 128, 64, 8, 4), (128, 256, 64, 4, 8), (128, 128, 64, 3, 4)),
}
BATCH_INVARIANT = (128, 64, 64, 4, 4)  # as in STREAM_K_TILES, for any number of rows


class KernelConfig(msgspec.Struct, frozen=True, omit_defaults=True):
    """How one GEMM is computed, and with which tiles.

    "cublas" is the product of the layer's method, "unpacked" cuBLAS with a weight whose codes are unpacked before, the
    others are `linear_skinny`, `linear_stream_k` and `linear_blocks`, or the kernels of quantized weights like them.
    """

    kernel: Literal["cublas", "skinny", "stream_k", "blocks", "mma", "wgmma", "unpacked"] = "cublas"
    out_tile: int = 0
    row_tile: int = 0
    in_tile: int = 0
    stages: int = 0  # tiles in flight; skinny kernel and "mma": tiles loaded before the PDL wait
    warps: int = 0
    split: int = 1  # split-K: parts that the sum of one output tile is divided into; "wgmma": 0 for all processors
    fetch: int = 0  # cache lines of each output's weights prefetched to L2 before the PDL wait
    rounds: bool = False  # skinny kernel of rounded inputs: it rounds them itself, in tiles of whole rows


CUBLAS = KernelConfig()


class LinearShape(msgspec.Struct, frozen=True, order=True):
    """A shape of linear layers, and how many layers of the model have it."""

    in_features: int
    out_features: int
    count: int
    form: str = "dense"  # of their weights, see `LinearMethod`

    @property
    def kind(self) -> tuple[str | None, tuple[int, int]]:
        """The form of the weight and `Linear.shape`."""
        return self.form, (self.in_features, self.out_features)


class TunedConfig(msgspec.Struct, frozen=True):
    """The measured kernel configs of a model for one number of rows.

    `configs` has one for each entry of `layers`, `expert_configs` one for each entry of `experts`.
    """

    layers: list[LinearShape]
    dtype: str
    rows: int
    configs: list[KernelConfig]
    experts: list[ExpertShape] = []
    expert_configs: list[ExpertConfig] = []


class TunedConfigFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The contents of the cache file."""

    version: int
    entries: list[TunedConfig]


def candidates(layer: LinearShape, rows: int, element_bytes: int, processors: int) -> list[KernelConfig]:
    """The kernel configs to measure against cuBLAS. Empty for dtypes and shapes that the kernels do not support."""
    if rows > MAX_ROWS or element_bytes != 2 or layer.in_features * element_bytes % 16:
        return []
    configs = [
        KernelConfig("skinny", out, 0, size, early, warps)
        for out, size, early, warps in SKINNY_TILES.get(rows, ())
        if size * early <= 2 * layer.in_features
    ]
    if rows > 1:
        for shape in of_rows(rows, STREAM_K_TILES):
            configs += [
                stream_k(layer, shape, split) for split in splits(layer, rows, shape, element_bytes, processors)
            ]
    return configs


def of_rows(rows: int, tiles: Mapping[int, Tiles]) -> Tiles:
    """Returns the entry of the fewest rows that are enough."""
    return tiles[next(most for most in tiles if rows <= most)]


def splits(
    layer: LinearShape, rows: int, shape: tuple[int, int, int, int, int], element_bytes: int, processors: int
) -> list[int]:
    """The split-K factors to try: 1, the largest with which all programs run at the same time, and half of that."""
    out_tile, row_tile, in_tile, stages, _ = shape
    tiles = -(-layer.out_features // out_tile) * -(-rows // row_tile)
    together = processors * max(SHARED_BYTES // ((out_tile + row_tile) * in_tile * element_bytes * stages), 1)
    most = max(min(together // tiles, layer.in_features // in_tile // FEWEST_STEPS), 1)
    return sorted({1, most, max(most // 2, 1)})


def batch_invariant_config(layer: LinearShape, element_bytes: int, processors: int) -> KernelConfig:
    """The kernel config of a layer under --batch-invariant, the same for any number of rows.

    CUBLAS if the stream-K kernel does not support the layer.
    """
    if element_bytes != 2 or layer.in_features * element_bytes % 16:
        return CUBLAS
    out_tile, _, in_tile, _, _ = BATCH_INVARIANT
    together = round(processors / -(-layer.out_features // out_tile))
    split = max(min(together, layer.in_features // in_tile // FEWEST_STEPS), 1)
    return stream_k(layer, BATCH_INVARIANT, split)


def stream_k(layer: LinearShape, shape: tuple[int, int, int, int, int], split: int) -> KernelConfig:
    """A config of the stream-K kernel with tiles as in STREAM_K_TILES."""
    fetch = 4 if layer.in_features * layer.out_features <= FETCH_ELEMENTS else 0
    return KernelConfig("stream_k", *shape, split, fetch)


class DefaultConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fastest kernel config of one shape and number of rows on the GPUs of CAPABILITY."""

    in_features: int
    out_features: int
    rows: int
    config: KernelConfig
    form: str = "dense"


def read_defaults(path: Path = DEFAULTS) -> list[DefaultConfig]:
    """Reads the shipped kernel configs, which serve until a model's own shapes are measured."""
    return msgspec.json.decode(path.read_bytes(), type=list[DefaultConfig])


def default_config(
    measured: Sequence[DefaultConfig], layer: LinearShape, rows: int, possible: Sequence[KernelConfig]
) -> KernelConfig:
    """The kernel config in `possible` that matches the default of the most similar shape and number of rows.

    CUBLAS if there is no default or no match. `split` may differ from the default's: the closest one is taken.
    """

    def distance(one: DefaultConfig) -> float:
        return (
            abs(math.log(one.in_features / layer.in_features))
            + abs(math.log(one.out_features / layer.out_features))
            + abs(math.log(one.rows / rows))
        )

    alike = (one for one in measured if (one.rows > 1) == (rows > 1) and one.form == layer.form)
    nearest = min(alike, key=distance, default=None)
    if nearest is None:
        return CUBLAS
    same = [config for config in possible if _unsplit(config) == _unsplit(nearest.config)]
    return min(same, key=lambda config: abs(config.split - nearest.config.split), default=CUBLAS)


def _unsplit(config: KernelConfig) -> KernelConfig:
    """A kernel config without `fetch` and `split`, which depend on the shape and the GPU."""
    return msgspec.structs.replace(config, split=1, fetch=0)


def pick(times: Mapping[KernelConfig, float]) -> KernelConfig:
    """The fastest kernel config if it beats cuBLAS by MARGIN, else CUBLAS. `times` must contain CUBLAS."""
    return fastest_over(CUBLAS, times)


def fastest_over(default: Config, times: Mapping[Config, float]) -> Config:
    """The fastest config if it beats `default` by MARGIN, else `default`, which `times` must contain."""
    quickest = min(times, key=lambda config: times[config])
    return quickest if times[quickest] < MARGIN * times[default] else default


def fastest_triton(times: Mapping[KernelConfig, float]) -> KernelConfig:
    """The fastest kernel config except CUBLAS. CUBLAS if there is no other."""
    others = [config for config in times if config != CUBLAS]
    return min(others, key=lambda config: times[config]) if others else CUBLAS


def distinct(sets: Sequence[list[KernelConfig]]) -> list[list[KernelConfig]]:
    return [configs for i, configs in enumerate(sets) if configs not in sets[:i]]


def next_best(times: Mapping[KernelConfig, float], taken: KernelConfig) -> list[KernelConfig]:
    """The kernel configs to try in place of `taken`: the NUM_TRIES fastest others, and CUBLAS."""
    others = sorted((config for config in times if config != taken), key=lambda config: times[config])
    return list(dict.fromkeys([*others[:NUM_TRIES], *(config for config in others if config == CUBLAS)]))


def fastest_set(times: Sequence[tuple[Sequence[KernelConfig], float]]) -> list[KernelConfig]:
    """The set of kernel configs with the fastest step, if it beats the first set by MARGIN; else the first set.

    A set has one kernel config for each shape. The first set has CUBLAS for all shapes.
    """
    configs, took = min(times, key=lambda one: one[1])
    return list(configs if took < MARGIN * times[0][1] else times[0][0])


def cache_path(
    device: str,
    versions: Sequence[str],
    folder: Path | None = None,
    environ: Mapping[str, str] = os.environ,
    what: str = "linear",
) -> Path:
    """The path of the cache file for a GPU model and the versions of libraries. what: is measured.

    It lies in `folder`. None: in the user's cache folder.
    """
    base = folder or Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "blockyard"
    name = re.sub(r"[^A-Za-z0-9.+]+", "-", "-".join((device, *versions)))
    return base / f"{what}-{name}.json"


def read_cache(path: Path) -> list[TunedConfig]:
    """Reads the cache file. Empty if it is missing, unreadable or of another CACHE_VERSION."""
    found = read_measured(path, TunedConfigFile, MEASURED)
    return found.entries if found is not None and found.version == CACHE_VERSION else []


def write_cache(path: Path, entries: Sequence[TunedConfig]) -> None:
    """Replaces the cache file atomically. If the folder is not writable, the next start measures again."""
    write_measured(path, TunedConfigFile(CACHE_VERSION, list(entries)), MEASURED)


def merge(old: Sequence[TunedConfig], new: Sequence[TunedConfig]) -> list[TunedConfig]:
    """`new`, and the entries of `old` for other layers, dtypes and numbers of rows."""
    keys = {_key(entry) for entry in new}
    return [*(entry for entry in old if _key(entry) not in keys), *new]


def find(
    entries: Sequence[TunedConfig],
    layers: list[LinearShape],
    dtype: str,
    rows: int,
    experts: Sequence[ExpertShape] = (),
) -> TunedConfig | None:
    wanted = (tuple(layers), tuple(experts), dtype, rows)
    return next((c for c in entries if _key(c) == wanted and _is_complete(c)), None)


def _is_complete(entry: TunedConfig) -> bool:
    return len(entry.configs) == len(entry.layers) and len(entry.expert_configs) == len(entry.experts)


def _key(entry: TunedConfig) -> tuple[tuple[LinearShape, ...], tuple[ExpertShape, ...], str, int]:
    return tuple(entry.layers), tuple(entry.experts), entry.dtype, entry.rows
