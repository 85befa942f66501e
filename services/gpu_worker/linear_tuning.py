"""Gives each linear layer on a GPU what computes it quickest, by measuring; loaded by name, on a GPU alone.

A layer is measured in a CUDA graph that goes through the weights of the model's layers of that shape, so that the L2
cache helps no more than in a step, with a norm before each product as in a step. Then whole steps are measured, since
what is best alone is not always best beside the others.
"""

import itertools
import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from triton.errors import TritonError
from triton.runtime.errors import OutOfResources

from blockyard.kernels.add_rms_norm import add_rms_norm
from blockyard.kernels.linear_few_rows import linear_few_rows
from blockyard.kernels.linear_rows import ALIGNMENT, Tiling, Workspace, linear_rows
from blockyard.kernels.overlap import can_overlap
from blockyard.services.gpu_worker import linear_picker as picker
from blockyard.services.gpu_worker.linear import Linear, Product, in_groups
from blockyard.services.gpu_worker.linear_picker import LIBRARY, Choice, Layer, Plan

log = logging.getLogger(__name__)

WORKSPACE_ELEMENTS = 6 << 20  # a tile of 128 x 256 for each of 192 programs
WORKSPACE_PROGRAMS = 1 << 14
WEIGHT_BYTES = 400 << 20  # of different weights in one measurement: several times the L2 cache
LAUNCHES = 4  # of one measurement at least
REPEATS = 3
ROUNDS = 2
COMPILERS = 16


class Tuner:
    """For the linear layers of one model."""

    def __init__(self, linears: Sequence[Linear]) -> None:
        self._linears = list(linears)
        weights = [_weight(linear) for linear in self._linears]
        self._device, self._dtype = weights[0].device, weights[0].dtype
        groups: dict[tuple[int, int], list[Linear]] = {}
        for linear in self._linears:
            groups.setdefault(linear.shape, []).append(linear)
        self.groups = list(groups.values())
        self.layers = [Layer(*group[0].shape, len(group)) for group in self.groups]
        properties = torch.cuda.get_device_properties(self._device)
        self._processors: int = properties.multi_processor_count
        self._overlap = can_overlap(self._device)
        self._workspace = Workspace(WORKSPACE_ELEMENTS, WORKSPACE_PROGRAMS, self._device)
        self._name: str = properties.name
        self._impossible: set[tuple[Plan, int]] = set()

    def tune(self, sizes: Sequence[int], report: Callable[[float], None], table: Path | None = None) -> str:
        """For steps of each of these numbers of rows. Says what came of it; the library computes what cannot be."""
        start, path = time.perf_counter(), table or self._path()
        known, dtype = picker.read_table(path), str(self._dtype).removeprefix("torch.")
        found = {rows: picker.find(known, self.layers, dtype, rows) for rows in sizes}
        plans = {rows: some for rows, some in found.items() if some is not None}
        missing = [rows for rows in sizes if rows not in plans]
        try:
            new = self._measure_all(missing, report)
        except (RuntimeError, TritonError) as e:  # OutOfMemoryError is among them
            why = str(e).splitlines()[0]
            log.warning("linear layers could not be measured: %s", why)
            return f"linear layers: in the library's kernels, own ones could not be measured: {why}"
        if new:
            choices = [Choice(self.layers, dtype, rows, some) for rows, some in new.items()]
            picker.write_table(path, picker.merge(picker.read_table(path), choices))
        plans |= new
        self._install(plans)
        ours = sum(plan != LIBRARY for some in plans.values() for plan in some)
        took = f"measured {len(missing)} of {len(found)} sizes in {time.perf_counter() - start:.1f} s"
        how = took if missing else "as measured before"
        return f"linear layers: {ours} of {len(found) * len(self.layers)} shapes in own kernels, {how}"

    def _measure_all(self, sizes: Sequence[int], report: Callable[[float], None]) -> dict[int, list[Plan]]:
        plans = {}
        with torch.inference_mode():
            self.compile(sizes)
            for i, rows in enumerate(sizes):
                report(i / len(sizes))
                plans[rows] = self.measure(rows)
        return plans

    def freeze(self) -> str:
        """One plan a layer for every number of rows."""
        for layer, group in zip(self.layers, self.groups, strict=True):
            plan = picker.frozen_plan(layer, self._dtype.itemsize, self._processors)
            for linear in group:
                product = self.product(plan, linear)
                linear.use({}, in_groups(product) if plan == LIBRARY else product)
        return "linear layers: one configuration each for any number of rows (--batch-invariant)"

    def product(self, plan: Plan, linear: Linear) -> Product:
        weight, bias = _weight(linear), linear.bias
        if plan.kernel == "library":
            return lambda x: F.linear(x, weight, bias)
        if plan.kernel == "few":
            out_tile, tile, warps, overlap = plan.out_tile, plan.in_tile, plan.warps, self._overlap
            return lambda x: linear_few_rows(
                x, weight, bias, out_tile=out_tile, tile=tile, warps=warps, overlap=overlap
            )
        tiling = Tiling(plan.out_tile, plan.row_tile, plan.in_tile, plan.stages, plan.warps, self._overlap, plan.fetch)
        workspace, split = self._workspace, plan.split
        return lambda x: linear_rows(x, weight, bias, tiling, workspace, split)

    def _path(self) -> Path:
        return picker.table_path(self._name, (f"torch{torch.__version__}", f"triton{triton.__version__}"))

    def _candidates(self, layer: Layer, rows: int) -> list[Plan]:
        group = self.groups[self.layers.index(layer)]
        if any(_weight(linear).data_ptr() % ALIGNMENT for linear in group):
            return []
        plans = picker.candidates(layer, rows, self._dtype.itemsize, self._processors)
        return [plan for plan in plans if _binary(plan, rows) not in self._impossible]

    def compile(self, sizes: Sequence[int]) -> None:
        """Side by side, each takes about a second; those that this GPU has no room for are left out from here on."""
        binaries = {_binary(p, rows) for rows in sizes for layer in self.layers for p in self._candidates(layer, rows)}
        with ThreadPoolExecutor(min(COMPILERS, os.cpu_count() or 1)) as threads:
            possible = zip(binaries, threads.map(self._compiles, binaries), strict=True)
        self._impossible |= {binary for binary, is_possible in possible if not is_possible}

    def _compiles(self, binary: tuple[Plan, int]) -> bool:
        plan, rows = binary
        with torch.inference_mode():
            for bias in {linear.bias is not None for linear in self._linears}:
                weight = torch.zeros(256, 256, dtype=self._dtype, device=self._device)
                try:
                    self.product(plan, Linear(weight, weight[0] if bias else None))(weight[:rows])
                except OutOfResources as e:
                    log.debug("%s: %s", plan, e)
                    return False
        return True

    def measure(self, rows: int) -> list[Plan]:
        """The quickest plans for so many rows, one a shape."""
        library = [LIBRARY] * len(self.layers)
        if not any(self._candidates(layer, rows) for layer in self.layers):
            return library
        best, ours = [], []
        for layer, group in zip(self.layers, self.groups, strict=True):
            times = {p: self.seconds(p, group, rows) for p in (LIBRARY, *self._candidates(layer, rows))}
            best.append(picker.pick(times))
            own = {plan: took for plan, took in times.items() if plan != LIBRARY}
            ours.append(min(own, key=lambda plan: own[plan]) if own else LIBRARY)
        if best == library:
            return library
        sets = [library, best] if best == ours else [library, best, ours]
        rounds = [[self.step_seconds(p, rows) for p in sets] for _ in range(ROUNDS)]  # in turn: clocks sink meanwhile
        took = [min(one[i] for one in rounds) for i in range(len(sets))]
        return picker.pick_set(list(zip(sets, took, strict=True)))

    def seconds(self, plan: Plan, group: Sequence[Linear], rows: int) -> float:
        """Of one layer, over layers of one shape."""
        some = group[: max(WEIGHT_BYTES // _weight(group[0]).nbytes, 1)]
        order = [(plan, linear) for linear in some] * -(-LAUNCHES // len(some))
        return _replay(self._step(order, rows)) / len(order)

    def step_seconds(self, plans: Sequence[Plan], rows: int, norms: bool = True) -> float:
        """Of all layers, by one plan a shape."""
        return _replay(self._step(self._order(plans), rows, norms))

    def _order(self, plans: Sequence[Plan]) -> list[tuple[Plan, Linear]]:
        """The plan of each layer, in the model's order."""
        by_shape = dict(zip(((layer.ins, layer.outs) for layer in self.layers), plans, strict=True))
        return [(by_shape[linear.shape], linear) for linear in self._linears]

    def _step(self, order: Sequence[tuple[Plan, Linear]], rows: int, norms: bool = True) -> Callable[[], None]:
        """All of these products, and where asked for a norm before each."""
        sizes = {linear.shape[0] for _, linear in order}
        inputs = {n: torch.randn(rows, n, dtype=self._dtype, device=self._device) for n in sizes}
        weights = {n: torch.ones(n, dtype=self._dtype, device=self._device) for n in sizes}
        products = [(self.product(plan, linear), linear.shape[0]) for plan, linear in order]

        def step() -> None:
            for product, n in products:
                product(add_rms_norm(inputs[n], None, weights[n], 1e-6) if norms else inputs[n])

        return step

    def _install(self, plans: dict[int, list[Plan]]) -> None:
        products: list[dict[int, Product]] = [{} for _ in self._linears]
        for rows, some in plans.items():
            for i, (plan, linear) in enumerate(self._order(some)):
                if plan != LIBRARY:
                    products[i][rows] = self.product(plan, linear)
        for linear, one in zip(self._linears, products, strict=True):
            linear.use(one)


def _binary(plan: Plan, rows: int) -> tuple[Plan, int]:
    """What is compiled for a plan: the same for any split, and for any rows unless they are few."""
    return msgspec.structs.replace(plan, split=1), rows if plan.kernel == "few" else 1


def _weight(linear: Linear) -> Tensor:
    assert linear.weight is not None
    return linear.weight


def _replay(step: Callable[[], None]) -> float:
    """Seconds that it takes in a CUDA graph, the best of REPEATS."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    graph = torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            step()
        graph.replay()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(REPEATS + 1)]  # type: ignore[no-untyped-call]
        events[0].record()
        for event in events[1:]:
            graph.replay()
            event.record()
        events[-1].synchronize()
    torch.cuda.current_stream().wait_stream(stream)
    took: list[float] = [before.elapsed_time(after) for before, after in itertools.pairwise(events)]
    return min(took) / 1e3
