"""Autotunes the linear layers of one model on a GPU and installs the fastest kernels. Imports Triton: for GPUs only.

For each number of rows it first times every shape alone. The fastest kernel alone is not always the fastest next to
other kernels, so it then varies one shape at a time in the first layers of the model. Finally it times all linear
layers of a step and keeps cuBLAS unless the Triton kernels are faster.
"""

import logging
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import torch
import triton
from triton.errors import TritonError

from blockyard.services.gpu_worker.cores import compile_threads
from blockyard.services.gpu_worker.layers.linear import FusedProduct, Linear, Product, RoundedProduct
from blockyard.services.gpu_worker.layers.moe.expert_configs import TUNED_PREFILL_ROWS, ExpertConfig
from blockyard.services.gpu_worker.layers.moe.expert_weights import ExpertProducts
from blockyard.services.gpu_worker.layers.moe.grouped_experts import GroupedExperts
from blockyard.services.gpu_worker.linear_tuning import kernel_configs
from blockyard.services.gpu_worker.linear_tuning.expert_tuner import ExpertTuner
from blockyard.services.gpu_worker.linear_tuning.kernel_configs import CUBLAS, KernelConfig, LinearShape, TunedConfig
from blockyard.services.gpu_worker.linear_tuning.products import Products, kernels_of
from blockyard.services.gpu_worker.linear_tuning.timing import EXCERPT, LinearTimer, kind_of
from blockyard.services.gpu_worker.quantization.method import Fusion

log = logging.getLogger(__name__)

ROUNDS = 2  # timings of all linear layers for each set of kernel configs
COMPILERS = 16  # threads, at most

Binary = tuple[KernelConfig, int, Fusion, str]  # identifies a compiled kernel, see `_binary`


class Tuner:
    """Owns the kernel configs of the linear layers of one model, for each number of rows.

    A layer of a form without kernels keeps the product of its `LinearMethod`, in a batch-invariant model in groups of
    rows.
    """

    def __init__(
        self,
        linears: Sequence[Linear],
        experts: Sequence[ExpertProducts] = (),
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """experts: mixtures of the model's layers, whose products are measured for the same numbers of rows. dtype: of
        the activations."""
        self._experts = ExpertTuner([one for one in experts if isinstance(one, GroupedExperts)])
        properties = torch.cuda.get_device_properties(device)
        self.products = Products(device, dtype, properties.multi_processor_count)
        self._all, self._linears = linears, [linear for linear in linears if self.products.knows(linear)]
        groups: dict[tuple[str | None, tuple[int, int]], list[Linear]] = {}
        for linear in self._linears:
            groups.setdefault(kind_of(linear), []).append(linear)
        self.groups = list(groups.values())
        self.layers = [LinearShape(*shape, len(group), form or "") for (form, shape), group in groups.items()]
        self._likes = {form or "": group[0].method for (form, _), group in groups.items()}
        self.timer = LinearTimer(self._linears, self.layers, self.products, device, dtype)
        self._name: str = properties.name
        self._failed: set[Binary] = set()  # failed to compile, for example for lack of shared memory
        self._tried: set[Binary] = set()  # compiled, or failed to
        self._dtype_name = str(dtype).removeprefix("torch.")
        self._cache_path = self._path()
        self._configs: dict[int, list[KernelConfig]] = {}
        self._expert_configs: dict[int, list[ExpertConfig]] = {}
        self.missing: list[int] = []  # numbers of rows without a measurement
        self._num_missing, self._problem = 0, ""
        self._capability = (properties.major, properties.minor)

    def begin(self, sizes: Sequence[int], folder: Path | None = None, most_tokens: int = 0) -> None:
        """Installs kernels for these numbers of rows: from the cache file, or from the defaults of similar shapes.

        folder: of the cache file, None: the user's cache folder. most_tokens: of a step; up to it, mixtures of experts
        are measured for numbers of rows that prefills have.
        """
        self._cache_path = self._path(folder)
        known = kernel_configs.read_cache(self._cache_path)
        if self._experts.shapes:
            sizes = [*sizes, *(rows for rows in TUNED_PREFILL_ROWS if max(sizes) < rows <= most_tokens)]
        found = {
            rows: kernel_configs.find(known, self.layers, self._dtype_name, rows, self._experts.shapes)
            for rows in sizes
        }
        self._configs = {rows: some.configs for rows, some in found.items() if some is not None}
        self._expert_configs = {rows: some.expert_configs for rows, some in found.items() if some is not None}
        self.missing = [rows for rows in sizes if rows not in self._configs]
        self._num_missing = len(self.missing)
        self._configs |= self._defaults(self.missing)
        self._install()

    def install_alike(self, sizes: Sequence[int]) -> None:
        """Installs the kernels of few rows that follow from shapes alone, so that layers of equal weights have the same
        bits on all ranks."""
        self._configs = {
            rows: [config if config.kernel == "skinny" else CUBLAS for config in configs]
            for rows, configs in self._defaults(sizes).items()
        }
        self._install()

    def _defaults(self, sizes: Sequence[int]) -> dict[int, list[KernelConfig]]:
        """The kernels that were measured for similar shapes, by number of rows."""
        measured = kernel_configs.read_defaults() if sizes and self._capability == kernel_configs.CAPABILITY else []
        return {
            rows: [
                kernel_configs.default_config(measured, layer, rows, self.candidates(layer, rows))
                for layer in self.layers
            ]
            for rows in sizes
        }

    def installed(self, sizes: Sequence[int] | None = None) -> bytes:
        """Returns the kernel configs for these numbers of rows, None for all, for `install_those_of`."""
        dtype, shapes = self._dtype_name, self._experts.shapes
        found = [
            TunedConfig(self.layers, dtype, rows, self._configs[rows], shapes, self._expert_configs.get(rows, []))
            for rows in sizes or self._configs
        ]
        return msgspec.json.encode(found)

    def install_those_of(self, leader: bytes) -> None:
        """Installs kernels of layers with shapes that the leader of the ranks has, too. leader: its `installed`."""
        for tuned in msgspec.json.decode(leader, type=list[TunedConfig]):
            measured = {layer.kind: one for layer, one in zip(tuned.layers, tuned.configs, strict=True)}
            own = self._configs.get(tuned.rows, [CUBLAS] * len(self.layers))
            self._configs[tuned.rows] = [
                measured.get(layer.kind, one) for layer, one in zip(self.layers, own, strict=True)
            ]
            of_experts = dict(zip(tuned.experts, tuned.expert_configs, strict=False))  # these may be not measured yet
            if self._experts.shapes and of_experts.keys() >= set(self._experts.shapes):
                self._expert_configs[tuned.rows] = [of_experts[shape] for shape in self._experts.shapes]
        self._install()

    def pieces(self) -> Iterator[int | None]:
        """Measures the missing sizes in pieces of a few milliseconds.

        Yields None after each piece, and a number of rows once its kernels are installed. After an error the missing
        sizes keep the default kernel configs.
        """
        still = list(self.missing)
        try:
            with torch.inference_mode():
                while still:
                    self._configs[still[0]] = yield from self.measuring(still[0])
                    self._expert_configs[still[0]] = yield from self._experts.measuring(still[0])
                    self._install()
                    self._keep(still[0])
                    self.missing.remove(still[0])
                    yield still.pop(0)
        except (RuntimeError, TritonError) as e:  # OutOfMemoryError is a RuntimeError
            self._problem = str(e).splitlines()[0]
            self.missing.clear()
            log.warning("linear layers could not be measured: %s", self._problem)
        self.timer.free_inputs()

    def _keep(self, rows: int) -> None:
        shapes, own = self._experts.shapes, self._expert_configs[rows]
        entry = TunedConfig(self.layers, self._dtype_name, rows, self._configs[rows], shapes, own)
        known = kernel_configs.read_cache(self._cache_path)
        kernel_configs.write_cache(self._cache_path, kernel_configs.merge(known, [entry]))

    def tune(
        self, sizes: Sequence[int], report: Callable[[float], None], folder: Path | None = None, most_tokens: int = 0
    ) -> str:
        """Measures and installs all sizes before it returns. Takes what `begin` takes, returns what `describe` does."""
        self.begin(sizes, folder, most_tokens)
        self.compile(self.missing)
        report(0.0)
        for _ in filter(None, self.pieces()):
            report(1.0 - len(self.missing) / self._num_missing)
        return self.describe()

    def describe(self) -> str:
        """One line for the log: how many shapes use Triton kernels, and how many sizes are measured."""
        if self._problem:
            return f"linear layers: in default kernels, they could not be measured: {self._problem}"
        ours = sum(config != CUBLAS for some in self._configs.values() for config in some)
        own = f"linear layers: {ours} of {len(self._configs) * len(self.layers)} shapes in own kernels"
        if self.missing:
            return f"{own}, {len(self.missing)} of {len(self._configs)} sizes are measured when idle"
        if not self._num_missing:
            return f"{own}, as measured before"
        return f"{own}, measured {self._num_missing} of {len(self._configs)} sizes"

    def launch_candidates(self) -> None:
        """Launches all candidates of the missing sizes on zeros, so that a `KernelCompiler` can record them."""
        for binary in self._binaries(self.missing):
            self._compiles(binary)
        for rows in self.missing:
            self._experts.launch_candidates(rows)

    def make_batch_invariant(self) -> str:
        """Installs one kernel config in each layer for every number of rows. Returns a line for the log."""
        found = {
            layer.kind: self.products.forms[kernels_of(layer.form)].batch_invariant(layer) for layer in self.layers
        }
        for linear in self._all:
            config = found.get(kind_of(linear), CUBLAS) if self.products.knows(linear) else CUBLAS
            if config == CUBLAS:
                linear.make_batch_invariant()
            else:
                linear.make_batch_invariant(self.products.of(config, linear), self.products.rounded(config, linear))
        return "linear layers: one configuration each for any number of rows (--batch-invariant)"

    def _path(self, folder: Path | None = None) -> Path:
        return kernel_configs.cache_path(
            self._name, (f"torch{torch.__version__}", f"triton{triton.__version__}"), folder
        )

    def candidates(self, layer: LinearShape, rows: int) -> list[KernelConfig]:
        """Returns the candidates beside the method's own product that compiled."""
        group = self.groups[self.layers.index(layer)]
        configs = self.products.forms[kernels_of(layer.form)].candidates(layer, rows, group)
        return [config for config in configs if _binary(config, rows, layer, group[0]) not in self._failed]

    def compile(self, sizes: Sequence[int]) -> None:
        """Compiles the candidates in threads of this process. Later measurements skip candidates that fail."""
        binaries = self._binaries(sizes)
        with ThreadPoolExecutor(compile_threads(min(COMPILERS, os.cpu_count() or 1))) as threads:
            possible = zip(binaries, threads.map(self._compiles, binaries), strict=True)
            self._failed |= {binary for binary, is_possible in possible if not is_possible}
        self._tried |= binaries

    def _binaries(self, sizes: Sequence[int]) -> set[Binary]:
        return {
            _binary(config, rows, layer, group[0])
            for rows in sizes
            for layer, group in zip(self.layers, self.groups, strict=True)
            for config in self.candidates(layer, rows)
        }

    def _compiles(self, binary: Binary) -> bool:
        config, rows, fusion, form = binary
        with torch.inference_mode():
            for bias in {linear.spec.bias for linear in self._linears}:
                try:
                    example = self.products.forms[kernels_of(form)].example(config, bias, fusion, self._likes[form])
                    self.timer.call(config, example, rows)()
                except TritonError as e:  # too little shared memory, or this Triton version cannot compile it
                    log.debug("%s: %s", config, e)
                    return False
        return True

    def measure(self, rows: int) -> list[KernelConfig]:
        """Returns the fastest kernel configs for a number of rows, one for each shape."""
        pieces = self.measuring(rows)
        while True:
            try:
                next(pieces)
            except StopIteration as end:
                configs: list[KernelConfig] = end.value
                return configs

    def measuring(self, rows: int) -> Generator[None, None, list[KernelConfig]]:
        """Same as `measure`, as a generator that yields after each timing."""
        cublas = [CUBLAS] * len(self.layers)
        for binary in self._binaries([rows]):
            if binary not in self._tried and not self._compiles(binary):
                self._failed.add(binary)
            self._tried.add(binary)
            yield
        if not any(self.candidates(layer, rows) for layer in self.layers):
            return cublas
        times: list[dict[KernelConfig, float]] = [{} for _ in self.layers]
        for layer, group, took in zip(self.layers, self.groups, times, strict=True):
            for config in (CUBLAS, *self.candidates(layer, rows)):
                took[config] = self.timer.seconds(config, group, rows)
                yield
        alone = [kernel_configs.pick(some) for some in times]
        sets = kernel_configs.distinct([cublas, alone, (yield from self._refine(alone, times, rows))])
        if len(sets) == 1:
            return cublas
        rounds: list[list[float]] = [[] for _ in sets]
        for _ in range(ROUNDS):  # alternates between the sets, because GPU clocks drop while measuring
            for took_s, configs in zip(rounds, sets, strict=True):
                took_s.append(self.timer.step_seconds(configs, rows))
                yield
        return kernel_configs.fastest_set(
            [(configs, min(took_s)) for configs, took_s in zip(sets, rounds, strict=True)]
        )

    def _refine(
        self, alone: list[KernelConfig], times: Sequence[Mapping[KernelConfig, float]], rows: int
    ) -> Generator[None, None, list[KernelConfig]]:
        """Improves the kernel configs one shape at a time, by the time of the first EXCERPT layers together.

        Starts from the faster of two sets: `alone`, and the fastest Triton kernel of every shape.
        """
        starts = kernel_configs.distinct([alone, [kernel_configs.fastest_triton(some) for some in times]])
        took, configs = min(
            (self.timer.excerpt_seconds(configs, rows), i, configs) for i, configs in enumerate(starts)
        )[::2]
        yield
        kinds = {kind_of(linear) for linear in self._linears[:EXCERPT]}  # a change of any other would measure noise
        for i, (layer, some) in enumerate(zip(self.layers, times, strict=True)):
            for config in kernel_configs.next_best(some, configs[i]) if layer.kind in kinds else []:
                others = [*configs[:i], config, *configs[i + 1 :]]
                seconds = self.timer.excerpt_seconds(others, rows)
                yield
                if seconds < kernel_configs.REFINE_MARGIN * took:
                    configs, took = others, seconds
        return configs

    def _install(self) -> None:
        products: list[dict[int, Product]] = [{} for _ in self._linears]
        fused: list[dict[int, FusedProduct]] = [{} for _ in self._linears]
        rounded: list[dict[int, RoundedProduct]] = [{} for _ in self._linears]
        for rows, some in self._configs.items():
            for i, (config, linear) in enumerate(self.timer.order(some)):
                if config != CUBLAS:
                    products[i][rows] = self.products.of(config, linear)
                    of_rounded = self.products.rounded(config, linear)
                    if of_rounded is not None:
                        rounded[i][rows] = of_rounded
                if config.kernel == "skinny" and linear.fusion is not Fusion.NONE:
                    fused[i][rows] = self.products.fused(config, linear)
        for linear, one, whole, codes in zip(self._linears, products, fused, rounded, strict=True):
            linear.use(one, fused=whole, rounded=codes)
        self._experts.install(self._expert_configs)


def _binary(config: KernelConfig, rows: int, layer: LinearShape, linear: Linear) -> Binary:
    """The key of a compiled kernel. It ignores `split`, and rows and fusion except for the skinny kernel:
    others are compiled for a tile of rows."""
    few, whole = config.kernel == "skinny", msgspec.structs.replace(config, split=1)
    return whole, rows if few else max(config.row_tile, 1), linear.fusion if few else Fusion.NONE, layer.form
