"""Gives each linear layer on a GPU what computes it quickest, by measuring; loaded by name, on a GPU alone.

First each shape alone, then, since what is best alone is not always best beside the others, one shape after the other
in a few layers, and in the end whole steps against the library's.
"""

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import torch
import triton
from triton.errors import TritonError

from blockyard.kernels.linear_rows import ALIGNMENT
from blockyard.services.gpu_worker import linear_picker as picker
from blockyard.services.gpu_worker.linear import Around, Fused, Linear, Product, in_groups
from blockyard.services.gpu_worker.linear_picker import LIBRARY, Choice, Layer, Plan
from blockyard.services.gpu_worker.linear_products import Products, weight_of
from blockyard.services.gpu_worker.linear_timing import EXCERPT, LinearTimer

log = logging.getLogger(__name__)

ROUNDS = 2
COMPILERS = 16

Binary = tuple[Plan, int, Around]


class Tuner:
    """For the linear layers of one model."""

    def __init__(self, linears: Sequence[Linear]) -> None:
        self._linears = list(linears)
        weights = [weight_of(linear) for linear in self._linears]
        self._device, self._dtype = weights[0].device, weights[0].dtype
        groups: dict[tuple[int, int], list[Linear]] = {}
        for linear in self._linears:
            groups.setdefault(linear.shape, []).append(linear)
        self.groups = list(groups.values())
        self.layers = [Layer(*group[0].shape, len(group)) for group in self.groups]
        properties = torch.cuda.get_device_properties(self._device)
        self._processors: int = properties.multi_processor_count
        self.products = Products(self._device)
        self.timer = LinearTimer(self._linears, self.layers, self.products)
        self._name: str = properties.name
        self._impossible: set[Binary] = set()

    def tune(
        self, sizes: Sequence[int], report: Callable[[float], None], table: Path | None = None, fused: bool = True
    ) -> str:
        """For steps of each of these numbers of rows. Says what came of it; the library computes what cannot be.
        `fused`: products may take in what is around them."""
        for linear in () if fused else self._linears:
            linear.around = ""
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
        self.timer.forget()
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
                product = self.products.of(plan, linear)
                linear.use({}, in_groups(product) if plan == LIBRARY else product)
        return "linear layers: one configuration each for any number of rows (--batch-invariant)"

    def _path(self) -> Path:
        return picker.table_path(self._name, (f"torch{torch.__version__}", f"triton{triton.__version__}"))

    def _candidates(self, layer: Layer, rows: int) -> list[Plan]:
        group = self.groups[self.layers.index(layer)]
        if any(weight_of(linear).data_ptr() % ALIGNMENT for linear in group):
            return []
        gates = all(linear.around == "gates" for linear in group)
        plans = picker.candidates(layer, rows, self._dtype.itemsize, self._processors, gates)
        return [plan for plan in plans if _binary(plan, rows, group[0]) not in self._impossible]

    def compile(self, sizes: Sequence[int]) -> None:
        """Side by side, each takes about a second; those that this GPU has no room for are left out from here on."""
        binaries = {
            _binary(plan, rows, group[0])
            for rows in sizes
            for layer, group in zip(self.layers, self.groups, strict=True)
            for plan in self._candidates(layer, rows)
        }
        with ThreadPoolExecutor(min(COMPILERS, os.cpu_count() or 1)) as threads:
            possible = zip(binaries, threads.map(self._compiles, binaries), strict=True)
        self._impossible |= {binary for binary, is_possible in possible if not is_possible}

    def _compiles(self, binary: Binary) -> bool:
        plan, rows, around = binary
        size = max(plan.in_tile * plan.stages, 256) if plan.kernel == "few" else 256
        with torch.inference_mode():
            for bias in {linear.bias is not None for linear in self._linears}:
                weight = torch.zeros(256, size, dtype=self._dtype, device=self._device)
                vector = torch.zeros(256, dtype=self._dtype, device=self._device) if bias else None
                try:
                    self.timer.call(plan, Linear(weight, vector, around), rows)()
                except TritonError as e:  # too little shared memory, or another Triton that does not compile it
                    log.debug("%s: %s", plan, e)
                    return False
        return True

    def measure(self, rows: int) -> list[Plan]:
        """The quickest plans for so many rows, one a shape."""
        library = [LIBRARY] * len(self.layers)
        if not any(self._candidates(layer, rows) for layer in self.layers):
            return library
        times = [
            {plan: self.timer.seconds(plan, group, rows) for plan in (LIBRARY, *self._candidates(layer, rows))}
            for layer, group in zip(self.layers, self.groups, strict=True)
        ]
        alone = [picker.pick(some) for some in times]
        sets = picker.distinct([library, alone, self._refine(alone, times, rows)])
        if len(sets) == 1:
            return library
        # in turn: clocks sink meanwhile
        rounds = [[self.timer.step_seconds(plans, rows) for plans in sets] for _ in range(ROUNDS)]
        took = [min(one[i] for one in rounds) for i in range(len(sets))]
        return picker.pick_set(list(zip(sets, took, strict=True)))

    def _refine(self, alone: list[Plan], times: Sequence[Mapping[Plan, float]], rows: int) -> list[Plan]:
        """From what is quickest alone, or from own kernels throughout: one shape after the other in the plan that is
        quickest beside the others, in the first layers."""
        starts = picker.distinct([alone, [picker.own(some) for some in times]])
        took, plans = min((self.timer.excerpt_seconds(plans, rows), i, plans) for i, plans in enumerate(starts))[::2]
        shapes = {linear.shape for linear in self._linears[:EXCERPT]}  # of others only noise would be seen
        for i, (layer, some) in enumerate(zip(self.layers, times, strict=True)):
            for plan in picker.next_best(some, plans[i]) if (layer.ins, layer.outs) in shapes else []:
                others = [*plans[:i], plan, *plans[i + 1 :]]
                seconds = self.timer.excerpt_seconds(others, rows)
                if seconds < picker.CLEARLY * took:
                    plans, took = others, seconds
        return plans

    def _install(self, plans: dict[int, list[Plan]]) -> None:
        products: list[dict[int, Product]] = [{} for _ in self._linears]
        fused: list[dict[int, Fused]] = [{} for _ in self._linears]
        gating: list[dict[int, Product]] = [{} for _ in self._linears]
        for rows, some in plans.items():
            for i, (plan, linear) in enumerate(self.timer.order(some)):
                if plan != LIBRARY:
                    products[i][rows] = self.products.of(plan, linear)
                if plan.kernel == "few" and linear.around:
                    fused[i][rows] = self.products.fused(plan, linear)
                if plan.gates and linear.around == "gates":
                    gating[i][rows] = self.products.gating(plan, linear)
        for linear, one, whole, gates in zip(self._linears, products, fused, gating, strict=True):
            linear.use(one, fused=whole, gating=gates)


def _binary(plan: Plan, rows: int, linear: Linear) -> Binary:
    """What is compiled for a plan: the same for any split, and anywhere for any rows unless they are few."""
    few = plan.kernel == "few"
    return msgspec.structs.replace(plan, split=1), rows if few else 1, linear.around if few else ""
