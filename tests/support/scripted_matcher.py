"""A matcher process inside of the test: it works only when it is told to, so it can be late or end at any point."""

import random
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import fake_grammar_engine
import numpy as np

from blockyard.services.gpu_worker.structured_output.mask_memory import MaskMemory
from blockyard.services.gpu_worker.structured_output.mask_program import MaskProgram
from blockyard.services.gpu_worker.structured_output.matcher_client import AboutSlot
from blockyard.services.gpu_worker.structured_output.matcher_frames import (
    FirstMask,
    MatcherSettings,
    SlotClose,
    SlotClosed,
    SlotFailed,
    SlotOpen,
    ToMatcher,
)
from blockyard.shared.grammars.interface import GrammarError, MatcherError


@dataclass
class Program:
    frame: SlotOpen
    program: MaskProgram
    has_mask: bool = False

    @property
    def index(self) -> int:
        return self.frame.num_prompt_tokens + self.program.num_outputs


class ScriptedMatcher:
    """Takes the place of `MatcherClient`. `running` has those that have not ended."""

    running: ClassVar[list["ScriptedMatcher"]] = []
    works_at_once = True  # otherwise `work` is called by the test

    def __init__(self, settings: MatcherSettings, memory_fd: int, command: Sequence[str]) -> None:
        self._memory = MaskMemory(memory_fd, settings.num_slots, settings.vocab_size)
        self._engine, self._settings = fake_grammar_engine.load(settings), settings
        self._inbound: deque[ToMatcher] = deque()
        self._answers: list[AboutSlot] = []
        self._programs: dict[int, Program] = {}
        self.is_alive, self.is_ready, self.failure, self.started_s = True, True, "", time.monotonic()
        self.num_first_masks = 0  # that the worker has heard of
        self.running.append(self)

    def send(self, frame: ToMatcher) -> None:
        if self.is_alive:
            self._inbound.append(frame)

    def receive(self) -> list[AboutSlot]:
        if self.works_at_once:
            self.work(random.Random(0), 1.0)
        answers, self._answers = self._answers, []
        self.num_first_masks += sum(isinstance(answer, FirstMask) for answer in answers)
        return answers

    def was_killed(self) -> bool:
        """It ends by itself, as with a grammar that breaks it."""
        return False

    def kill(self) -> None:
        self.is_alive = False
        if self in self.running:
            self.running.remove(self)

    close = kill

    def work(self, rng: random.Random, likely: float) -> None:
        """Reads frames, then makes each mask that it can with this probability."""
        while self._inbound and self.is_alive:
            frame = self._inbound.popleft()
            if isinstance(frame, SlotOpen):
                self._open(frame)
            elif isinstance(frame, SlotClose):
                self._programs.pop(frame.slot, None)
                self._answers.append(SlotClosed(frame.slot, frame.owner))
        for slot in [*self._programs]:
            if self.is_alive and rng.random() < likely:
                self._make_mask(slot)

    def _open(self, frame: SlotOpen) -> None:
        """Leaves masks and tags of another owner and of another index, as an earlier owner would."""
        grammar = frame.rules.constraint.grammar
        words, tags = self._memory.masks[frame.slot], self._memory.tags[frame.slot]
        try:
            compiled = None if grammar is None else self._engine.compile(grammar)
            program = MaskProgram(frame.rules, compiled, self._settings.vocab_size, self._settings.eos_token_ids)
            program.accept(np.frombuffer(frame.output_ids, "<u4").tolist())
        except (GrammarError, MatcherError) as e:
            self._answers.append(SlotFailed(frame.slot, frame.owner, str(e)))
            return
        opened = self._programs[frame.slot] = Program(frame, program)
        words[:] = -1
        tags[opened.index % 2], tags[1 - opened.index % 2] = (
            frame.owner << 32 | opened.index - 2,
            (frame.owner + 1) << 32 | opened.index + 1,
        )

    def _make_mask(self, slot: int) -> None:
        it = self._programs[slot]
        owner = it.frame.owner
        try:
            if it.has_mask:
                record = int(self._memory.sampled[slot])
                if record >> 20 != owner << 22 | it.index:
                    return
                it.program.accept([record & (1 << 20) - 1])
            if not it.program.has_ended:
                it.program.fill(self._memory.masks[slot, it.index % 2])
                self._memory.publish(slot, owner, it.index)
        except MatcherError as e:
            del self._programs[slot]
            self._answers.append(SlotFailed(slot, owner, f"{e}, at output token {it.program.num_outputs + 1}"))
            return
        if it.program.has_ended:
            del self._programs[slot]
        elif not it.has_mask:
            it.has_mask = True
            self._answers.append(FirstMask(slot, 0.0))
