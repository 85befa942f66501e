"""Steps on the CPU as one call for each 64 tokens, compiled by the machine's C++ compiler.

It runs beside the start, at the lowest priority; until its library is there steps are plain. The first steps of each
size are computed both ways: they must agree, and the quicker way stays.
"""

import logging
import time

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from blockyard.kernels import decode_step
from blockyard.kernels.compile_cpp import COMPILERS, Library, cache_folder, find_compiler
from blockyard.kernels.decode_step import DecodeStep, Rows
from blockyard.services.gpu_worker.models.decoder import Model
from blockyard.services.gpu_worker.runner import Runner
from blockyard.services.gpu_worker.step_trials import Trials

log = logging.getLogger(__name__)

Ints = npt.NDArray[np.int64]

MOST_COPY_BYTES = 2 << 30  # of weights, held beside those of plain steps
AT_ONCE = 64  # rows of a call: their activations stay in cache
MOST_KEYS = 512  # that tokens of a step with prompts may have before them, on the average
COPY_SHARE = 4  # and at most one part in so many of the memory that is free
TOLERANCES = {torch.float32: 1e-2, torch.bfloat16: 0.3}  # of a hidden row, as a share of its length


def make(model: Model, free_bytes: int) -> "tuple[CompiledSteps | None, str]":
    """Or none, and what to say of it. To be called before `model.prepare`, which drops what is copied here."""
    problem, compiler = why_none(model, free_bytes), find_compiler()
    if not problem and compiler is None:
        problem = f"no C++ compiler ($CXX, {', '.join(COMPILERS)})"
    if problem or compiler is None:
        return None, f"decode steps: plain; compiled ones: {problem}"
    library = Library(decode_step.SOURCE, cache_folder(), compiler)
    how = "compiled" if library.path.is_file() else f"plain until {compiler} has compiled them"
    return CompiledSteps(model, library), f"decode steps: {how}"


def why_none(model: Model, free_bytes: int) -> str:
    """Why steps stay plain; empty if there is no reason to."""
    weights = model.decode_weights()
    if weights is None:
        return "this architecture has none"
    if problem := decode_step.why_not(weights):
        return f"none for {problem}"
    size, most = decode_step.size_bytes(weights), min(MOST_COPY_BYTES, free_bytes // COPY_SHARE)
    if size > most:
        return f"their copy of the weights would take {size / 2**30:.2f} GiB, more than {most / 2**30:.2f}"
    return ""


class CompiledSteps:
    """For HostSteps.device."""

    def __init__(self, model: Model, library: Library) -> None:
        weights = model.decode_weights()
        assert weights is not None
        self._model, self._library, self._dtype = model, library, weights.norm.dtype
        self._step = DecodeStep(weights)
        self._trials = Trials()
        self._ready = self._stopped = False
        library.start()

    def serve(self, runner: Runner) -> None:
        """From now on, as soon as the library is there."""
        self._pool, self._batch, self._host = runner.pool, runner.batch, runner.host
        runner.host.device = self

    def forget(self) -> None:
        """Nothing is kept from step to step."""

    def takes(self, slots: Ints, counts: Ints) -> bool:
        """All decodes; prompts while they are short, since each of their tokens reads its keys alone."""
        if self._stopped or not (self._ready or self._poll()):
            return False
        rows = int(counts.sum())
        if rows > len(slots):
            keys = self._batch.slots.computed[slots] + counts / 2  # on the average
            if float(keys @ counts) > MOST_KEYS * rows:
                return False
        return self._trials.prefers_compiled(rows)

    def run(self, slots: Ints, counts: Ints) -> tuple[Tensor, Tensor | None]:
        """Hidden rows in the model's dtype and, where every count is one, logits in float32."""
        if self._trials.is_over(int(counts.sum())):
            return self._forward(slots, counts)
        return self._try(slots, counts)

    def _poll(self) -> bool:
        library = self._library.poll()
        if library is not None:
            self._step.bind(library, list(self._pool.memory), self._model.rotations, torch.get_num_threads())
            self._ready = True
        elif self._library.problem:
            self._stop(f"cannot be compiled: {self._library.problem}")
        return self._ready

    def _forward(self, slots: Ints, counts: Ints) -> tuple[Tensor, Tensor | None]:
        table = self._batch.slots
        rows, positions = slots, table.computed[slots]
        if decodes := int(counts[-1]) == 1:
            logits = torch.empty((len(slots), self._model.shape.vocab_size))
        else:
            rows = np.repeat(slots, counts)
            positions = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts - positions, counts)
        ids, size = table.token_ids[rows, positions], table.block_size
        self._batch.names.forget(table.tables[rows, positions // size])
        hidden = []
        for start in range(0, len(rows), AT_ONCE):
            part = slice(start, start + AT_ONCE)
            tables = table.tables[rows[part], : int(positions[part].max()) // size + 1]
            arrays = (ids[part], positions[part], tables)
            hidden.append(self._step(Rows(*map(torch.from_numpy, arrays)), logits[part] if decodes else None))
        whole = hidden[0] if len(hidden) == 1 else torch.cat(hidden)
        return whole.to(self._dtype), logits if decodes else None

    def _try(self, slots: Ints, counts: Ints) -> tuple[Tensor, Tensor | None]:
        """Both ways. Tokens come from the plain one."""
        start = time.perf_counter()
        order, _, plain = self._host.forward(slots.copy(), counts)
        logits = self._model.logits(plain) if int(counts[-1]) == 1 else None
        middle = time.perf_counter()
        hidden, _ = self._forward(order, counts)
        rows = len(hidden)
        self._trials.add(rows, middle - start, time.perf_counter() - middle)
        distance = _distance(hidden, plain)
        if distance > TOLERANCES[self._dtype]:
            self._stop(f"differ from plain ones by {distance:.2g} of the hidden rows")
        elif self._trials.is_over(rows):
            log.info("compiled steps: %s", self._trials.told(rows))
            self._host.planner.forget()  # what plain steps keep for the next one takes memory
        place = {slot: i for i, slot in enumerate(order.tolist())}  # decodes may have changed places
        decodes = [place[slot] for slot in slots[: int((counts == 1).sum())].tolist()]
        plain = torch.cat((plain[decodes], plain[len(decodes) :]))
        return plain, None if logits is None else logits[decodes]

    def _stop(self, why: str) -> None:
        log.warning("decode steps stay plain, the compiled ones %s", why)
        self._stopped = True


def _distance(hidden: Tensor, expected: Tensor) -> float:
    """Of the row that is furthest off, as a share of its length; rows that are not finite are not looked at."""
    rows = torch.isfinite(expected).all(-1)
    away = (hidden.float() - expected.float()).norm(dim=-1) / expected.float().norm(dim=-1).clamp_min(1e-9)
    return float(away[rows].nan_to_num(nan=torch.inf).max()) if bool(rows.any()) else 0.0
