"""The open slots of a matcher process: compiles new grammars in threads, reads tokens, writes masks."""

import hashlib
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import msgspec
import numpy as np

from blockyard.services.gpu_worker.arrays import Ints
from blockyard.services.gpu_worker.structured_output.mask_memory import TOKEN_BITS, MaskMemory, record_of
from blockyard.services.gpu_worker.structured_output.mask_program import MaskProgram
from blockyard.services.gpu_worker.structured_output.matcher_frames import (
    FirstMask,
    FromMatcher,
    SlotClose,
    SlotClosed,
    SlotFailed,
    SlotOpen,
)
from blockyard.services.gpu_worker.structured_output.reasoning_ends import EndsByText
from blockyard.shared.grammars.interface import (
    CompiledGrammar,
    Engine,
    GrammarError,
    MatcherError,
)
from blockyard.shared.messages import Grammar

MAX_COMPILED = 256  # grammars that are kept
COMPILE_THREADS = 2
NICENESS = 10  # of threads that compile: masks come first
MOST_OPENED = 8  # slots of compiled grammars that one turn opens: the others' masks come first


@dataclass(slots=True, eq=False)
class OpenSlot:
    frame: SlotOpen
    opened_s: float
    program: MaskProgram | None = None  # None: it is not compiled yet
    has_mask: bool = False

    @property
    def next_index(self) -> int:
        """Index of the token that the next mask is for."""
        assert self.program is not None
        return self.frame.num_prompt_tokens + self.program.num_outputs


class CompiledGrammars:
    """Compiled grammars by the hash of their source; the least recently used ones are dropped."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._lock = engine, threading.Lock()
        self._kept: OrderedDict[bytes, Future[CompiledGrammar]] = OrderedDict()

    def find(self, grammar: Grammar) -> CompiledGrammar | None:
        """A grammar that is compiled."""
        with self._lock:
            found = self._kept.get(_key(grammar))
        return found.result() if found is not None and found.done() and found.exception() is None else None

    def get(self, grammar: Grammar) -> CompiledGrammar:
        """Compiles a grammar, or waits for a thread that compiles the same one. Raises GrammarError."""
        key = _key(grammar)
        with self._lock:
            found = self._kept.get(key)
            mine = found is None
            if found is None:
                found = self._kept[key] = Future()
            self._kept.move_to_end(key)
            while len(self._kept) > MAX_COMPILED:
                self._kept.popitem(last=False)
        if mine:
            try:
                found.set_result(self._engine.compile(grammar))
            except Exception as e:  # noqa: BLE001 - what a library raises concerns this grammar alone
                found.set_exception(e)
        return found.result()


class SlotMatchers:
    """Keeps a program for each open slot. Only the main thread opens and closes slots."""

    def __init__(
        self,
        engine: Engine,
        memory: MaskMemory,
        eos_token_ids: list[int],
        answer: Callable[[FromMatcher], None],
        wake: Callable[[], None],
        ends: EndsByText,
    ) -> None:
        """answer: sends a frame to the worker. wake: called in another thread when `turn` has something to do."""
        self._ends = ends
        self._memory, self._eos, self._answer, self._wake = memory, eos_token_ids, answer, wake
        self._compiled = CompiledGrammars(engine)
        self._slots: dict[int, OpenSlot] = {}
        self._numbers = np.zeros(0, np.int64)  # slots that have a mask and wait for its token ...
        self._keys: Ints = np.zeros(0, np.int64)  # ... and `record_of` that token, without the token
        self._keys_changed = False  # since they were collected
        self._opened: deque[tuple[OpenSlot, CompiledGrammar | None]] = deque()  # that need no thread
        self._prepared: list[tuple[OpenSlot, Future[MaskProgram]]] = []
        self._prepared_lock = threading.Lock()
        self._compilers = ThreadPoolExecutor(COMPILE_THREADS, "compile", _be_nice)
        self.last_token_s = 0.0  # when `turn` has last found a token, of `time.monotonic`

    @property
    def are_waiting(self) -> bool:
        """Whether a slot waits for its token."""
        return bool(len(self._numbers))

    @property
    def have_opened(self) -> bool:
        """Whether the next `turn` opens slots."""
        return bool(self._opened)

    def open(self, frame: SlotOpen) -> None:
        slot = self._slots[frame.slot] = OpenSlot(frame, time.monotonic())
        self._memory.begin(frame.slot, frame.owner, 0)
        self._keys_changed = True
        grammar = frame.rules.constraint.grammar
        compiled = None if grammar is None else self._compiled.find(grammar)
        is_quick = not frame.output_ids and self._ends.are_ready(frame.rules.constraint)
        if (grammar is None or compiled is not None) and is_quick:
            self._opened.append((slot, compiled))  # quick, while a thread would wait for the GIL for milliseconds
        else:
            future = self._compilers.submit(self._prepare, frame)
            future.add_done_callback(lambda done: self._on_prepared(slot, done))

    def close(self, frame: SlotClose) -> None:
        slot = self._slots.get(frame.slot)
        if slot is not None and slot.frame.owner == frame.owner:
            del self._slots[frame.slot]
            self._memory.rest(frame.slot)
            self._keys_changed = True
        self._answer(SlotClosed(frame.slot, frame.owner))

    def turn(self) -> None:
        """Writes the masks of slots with a sampled token, and of slots with a grammar that has just compiled."""
        if self._keys_changed:
            self._collect_keys()
        with self._prepared_lock:
            prepared, self._prepared = self._prepared, []
        if len(self._numbers):
            found, tokens = self._memory.tokens(self._numbers, self._keys)
            places = np.flatnonzero(found)
            if len(places):
                self.last_token_s = time.monotonic()
                for number, token in zip(self._numbers[places].tolist(), tokens[places].tolist(), strict=True):
                    self._make_mask(self._slots[number], token)
                self._keys[places] += 1 << TOKEN_BITS
        for slot, made in prepared:
            if self._install(slot, made.result):
                self._make_mask(slot, None)
        for _ in range(min(MOST_OPENED, len(self._opened))):
            slot, compiled = self._opened.popleft()
            if self._install(slot, partial(self._program, slot.frame, compiled)):
                self._make_mask(slot, None)
        if self._keys_changed:
            self._collect_keys()

    def _prepare(self, frame: SlotOpen) -> MaskProgram:
        """Compiles a slot's grammar and advances over its output, in a thread."""
        grammar = frame.rules.constraint.grammar
        return self._program(frame, None if grammar is None else self._compiled.get(grammar))

    def _program(self, frame: SlotOpen, compiled: CompiledGrammar | None) -> MaskProgram:
        ends = self._ends.of(frame.rules.constraint)
        program = MaskProgram(frame.rules, compiled, self._memory.vocab_size, self._eos, ends)
        program.accept(np.frombuffer(frame.output_ids, "<u4").tolist())
        return program

    def _on_prepared(self, slot: OpenSlot, future: "Future[MaskProgram]") -> None:
        with self._prepared_lock:
            self._prepared.append((slot, future))
        self._wake()

    def _install(self, slot: OpenSlot, make: Callable[[], MaskProgram]) -> bool:
        """Whether the slot is still open and has a program now."""
        frame = slot.frame
        if self._slots.get(frame.slot) is not slot:
            return False
        try:
            slot.program = make()
        except Exception as e:  # noqa: BLE001 - what a library raises concerns this slot alone
            del self._slots[frame.slot]
            self._memory.rest(frame.slot)
            self._answer(SlotFailed(frame.slot, frame.owner, _cause(e)))
            return False
        return True

    def _make_mask(self, slot: OpenSlot, token: int | None) -> None:
        """Accepts the slot's token, if there is one, and writes its next mask."""
        frame, program, memory = slot.frame, slot.program, self._memory
        assert program is not None
        index = slot.next_index if token is None else slot.next_index + 1
        memory.begin(frame.slot, frame.owner, index)
        try:
            if token is not None:
                program.accept([token])
            if not program.has_ended:
                program.fill(memory.masks[frame.slot, index % 2])
                memory.publish(frame.slot, frame.owner, index)
        except Exception as e:  # noqa: BLE001 - what a library raises concerns this slot alone
            self._answer(SlotFailed(frame.slot, frame.owner, _problem(e, slot)))
            del self._slots[frame.slot]
            self._keys_changed = True
        else:
            self._keys_changed |= program.has_ended or not slot.has_mask
            if not slot.has_mask:
                slot.has_mask = True
                self._answer(FirstMask(frame.slot, time.monotonic() - slot.opened_s))
        memory.rest(frame.slot)

    def _collect_keys(self) -> None:
        self._keys_changed = False
        waiting = [s for s in self._slots.values() if s.has_mask and s.program is not None and not s.program.has_ended]
        self._numbers = np.array([s.frame.slot for s in waiting], np.int64)
        self._keys = np.array([record_of(s.frame.owner, s.next_index, 0) for s in waiting], np.int64)


def _key(grammar: Grammar) -> bytes:
    return hashlib.sha256(msgspec.msgpack.encode(grammar)).digest()


def _problem(error: Exception, slot: OpenSlot) -> str:
    assert slot.program is not None
    return f"{_cause(error)}, at output token {slot.program.num_outputs + 1}"


def _cause(error: BaseException) -> str:
    return str(error) if isinstance(error, GrammarError | MatcherError) else f"{type(error).__name__}: {error}"


def _be_nice() -> None:
    """Lowers the priority of the calling thread."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
