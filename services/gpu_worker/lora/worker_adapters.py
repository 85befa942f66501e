"""The adapters of one worker: read by a process, arranged in pieces between steps, and placed by plans."""

import itertools
import logging
import time
import weakref
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace

from blockyard.services.gpu_worker.interfaces import LoadedAdapter
from blockyard.services.gpu_worker.lora.module_tensors import ModuleTensors
from blockyard.services.gpu_worker.lora.places import AdapterPlaces, HostAdapter, prepare_alike
from blockyard.services.gpu_worker.lora.read_modules import AdapterLimits, ReadModules
from blockyard.services.gpu_worker.lora.reader_client import AdapterReader, NotRead
from blockyard.services.gpu_worker.lora.targets import ModelTargets
from blockyard.shared.errors import AdapterError
from blockyard.shared.messages import AdapterPlaced, AddedToken

log = logging.getLogger(__name__)

PIECES_S = 0.001  # of each poll, or more behind a long step; one piece may take longer
PIECES_SHARE = 0.05  # of the time since the last poll ...
MOST_PIECES_S = 0.01  # ... up to this, or always if no step waits
MOST_FORMS = 64  # of adapters that are kept


@dataclass(frozen=True, slots=True, eq=False)
class _Arranged:
    """An adapter that is read and not arranged yet."""

    job: int
    adapter: int
    path: str
    notes: list[str]
    pieces: Generator[bool, None, HostAdapter]


def arrange_modules(
    read: ReadModules, targets: ModelTargets, limits: AdapterLimits
) -> Generator[bool, None, HostAdapter]:
    """Brings an adapter into the order of a model's products, module by module. Raises AdapterError.

    Takes the modules out of `read`: as many tensors as a mixture has would take long to free at once.
    """
    adding, of_tokens, others = list[ModuleTensors](), list[ModuleTensors](), list[ModuleTensors]()
    for module in read.modules:
        if targets.tokens.may_add(module.name):
            adding.append(module)
        yield True
    added = targets.tokens.cut_added(adding, read.config, limits.max_rows)
    read.modules.reverse()
    while read.modules:
        if (module := read.modules.pop()).tensors():
            (of_tokens if module.is_of_tokens else others).append(module)
        yield True
    deltas = yield from targets.arrange(others, limits.dtype, read.config, limits.max_rank)
    tokens = targets.tokens.arrange(of_tokens, read.config, limits.dtype, limits.max_rows, added)
    factor, max_len = targets.long_context(read.config.context_length)
    held = HostAdapter(read.digest, deltas, tokens, long_factor=factor, max_len=max_len)
    return replace(held, added_texts=_added_texts(read, targets.vocab_size, held.num_added))


def _added_texts(read: ReadModules, vocab_size: int, num_added: int) -> list[AddedToken] | None:
    """The tokens of its own tokenizer that have an embedding; None: its tokenizer is not used.

    Raises AdapterError if that leaves added tokens without a text.
    """
    if read.texts is None:
        return None
    if read.texts.problem:
        if num_added:
            raise AdapterError(
                f"the adapter adds {num_added} tokens, and its tokenizer cannot be used: {read.texts.problem}"
            )
        read.notes.append(f"its tokenizer is not used: {read.texts.problem}")
        return None
    return [one for one in read.texts.added if one.token_id < vocab_size + num_added]


class WorkerAdapters:
    """Implements `AdapterHost`."""

    def __init__(
        self, targets: ModelTargets, places: AdapterPlaces, limits: AdapterLimits, reader: AdapterReader
    ) -> None:
        self.places, self._long = places, targets.long_rotations
        self._targets, self._limits, self._reader = targets, limits, reader
        self._held: dict[int, HostAdapter] = {}  # by the scheduler's number
        self._asked: dict[int, tuple[int, str]] = {}  # adapters and their folders, by job
        self._jobs = itertools.count(1)
        self._arranged: list[_Arranged] = []
        self._by_form: dict[bytes, HostAdapter] = {}  # an adapter of each form, without its bytes
        self._polled_s = 0.0
        weakref.finalize(self, reader.close)

    @property
    def is_loading(self) -> bool:
        return bool(self._asked or self._arranged)

    def load(self, adapter: int, path: str, job: int | None = None) -> None:
        """job: a number that was not used before, which `poll` returns with the adapter; None: one of ours."""
        job = next(self._jobs) if job is None else job
        self._asked[job] = adapter, path
        self._reader.ask(job, path)

    def drop(self, adapter: int) -> None:
        self._held.pop(adapter, None)

    def reset(self) -> None:
        self._asked.clear()
        self._arranged.clear()
        self._held.clear()

    def poll(self, *, is_idle: bool = False) -> list[LoadedAdapter]:
        done: list[LoadedAdapter] = []
        for job, read in self._reader.receive():
            asked = self._asked.pop(job, None)
            if asked is None:
                continue  # it was asked for before a reset
            adapter, path = asked
            if isinstance(read, NotRead):
                done.append(LoadedAdapter(adapter, error=read.cause, status=read.status, job=job))
            else:
                self._arranged.append(_Arranged(job, adapter, path, read.notes, self._pieces(read)))
        now_s = time.monotonic()
        least_s = MOST_PIECES_S if is_idle else PIECES_S
        end_s = now_s + max(least_s, min(PIECES_SHARE * (now_s - self._polled_s), MOST_PIECES_S))
        for one in list(self._arranged):  # while one is copied by a thread, the next is arranged
            step: LoadedAdapter | bool = True
            while step is True and time.monotonic() < end_s:
                step = self._advance(one)
            if isinstance(step, LoadedAdapter):
                self._arranged.remove(one)
                done.append(step)
        self._polled_s = time.monotonic()
        return done

    def place(self, placed: Sequence[AdapterPlaced]) -> None:
        """Call it at the launch of the plan that places them."""
        for one in placed:
            self.places.put(one.place, held := self._held[one.adapter])
            if self._long is not None:
                self._long.put(one.place, held.long_factor)

    def _pieces(self, read: ReadModules) -> Generator[bool, None, HostAdapter]:
        if (template := self._by_form.get(read.form)) is not None and read.memory is not None:
            return (yield from prepare_alike(template, read.digest, read.memory))
        adapter = yield from arrange_modules(read, self._targets, self._limits)
        held = yield from self.places.prepare(adapter, read.memory)
        packed, is_known = held.packed, not read.form or read.form in self._by_form
        if packed is not None and packed.copy_alike is not None and not is_known and len(self._by_form) < MOST_FORMS:
            self._by_form[read.form] = replace(held, packed=replace(packed, chunks=()))
            self._reader.know(read.form)
        return held

    def _advance(self, one: _Arranged) -> LoadedAdapter | bool:
        """Computes a piece. Returns whether the next one can be computed now; of the last one its result."""
        try:
            return next(one.pieces)
        except StopIteration as e:
            held: HostAdapter = e.value
            self._held[one.adapter] = held
            columns = (one.adapter, held.digest, held.size_bytes)
            return LoadedAdapter(
                *columns,
                notes=one.notes,
                max_len=held.max_len,
                num_added_tokens=held.num_added,
                has_tokenizer=held.added_texts is not None,
                added_tokens=list(held.added_texts or ()),
                job=one.job,
            )
        except AdapterError as e:
            return LoadedAdapter(one.adapter, error=str(e), job=one.job)
        except Exception as e:  # a broken adapter is no reason to end the worker
            log.exception("adapter %s cannot be arranged", one.path)
            return LoadedAdapter(one.adapter, error=f"it cannot be arranged: {type(e).__name__}", job=one.job)
