"""The worker's end of structured output: opens slots at matcher processes, returns masks, starts processes again."""

import itertools
import logging
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from blockyard.services.gpu_worker.slots import Problem, Slots
from blockyard.services.gpu_worker.structured_output import matcher_client
from blockyard.services.gpu_worker.structured_output.mask_memory import OWNER_BITS, MaskMemory
from blockyard.services.gpu_worker.structured_output.matcher_client import MatcherClient
from blockyard.services.gpu_worker.structured_output.matcher_frames import (
    FirstMask,
    MatcherSettings,
    OutputRules,
    SlotClose,
    SlotClosed,
    SlotOpen,
    TokensSampled,
)
from blockyard.shared.grammars.interface import MaskWords
from blockyard.shared.messages import FIRST_MASK_S, GrammarEngine, Sampling, SlotStart, Stats
from blockyard.shared.process.cores import usable_cores

log = logging.getLogger(__name__)

GRAMMARS_FAULT, OUR_FAULT = 400, 500  # HTTP statuses of slots that fail; clients repeat a request after a 500
POLL_S = 20e-6  # between two looks of a process for tokens of a device
LOOK_S = 50e-6  # between two looks for a mask
PATIENCE_S = 0.003  # a step waits so long for a row if its last mask was there in time ...
ALONE_S = 0.05  # ... and so long if it has no other row to sample
START_S = 60.0  # a process that has not loaded its engine by then has failed
OVERDUE_S = 10.0  # a choice fails if its mask takes longer, and its process is killed
MOST_STRIKES = 2  # a choice fails if its process ended so many times while it made the same mask
MOST_DEATHS = 3  # an engine has failed if its process ended so many times in a row without a mask ...
KILLED_S = 60.0  # ... or a choice if its processes were killed from outside for so long, without a token between
MOST_PROCESSES = 8  # of an engine, if a device samples ...
CORES_OF_PROCESS = 2  # ... and the machine has so many cores for each ...
OTHER_CORES = 2  # ... besides these


class MatcherKey(NamedTuple):
    """Names a matcher process."""

    engine: GrammarEngine
    number: int  # among the processes of this engine


@dataclass(slots=True, eq=False)
class ConstrainedSlot:
    owner: int
    process: MatcherKey
    rules: OutputRules
    num_prompt_tokens: int
    is_in_time: bool = False  # its last mask was there when a step needed it
    late_index: int = 0  # of the last mask that was late ...
    late_since_s: float = 0.0  # ... since then, without the time in which its engine was loaded
    lost_s: float | None = None  # its process has ended then, and it is not open again
    strikes: int = 0
    struck_tag: int = 0  # of the mask that was made at the last strike
    killed_index: int = 0  # of the next token when its process was last killed from outside ...
    killed_s: float = 0.0  # ... the first time at that token
    is_deferred: bool = False  # it is opened when another process has closed the slot
    problem: Problem | None = None  # the reason that it gets no more masks


class MatcherProcesses:
    """All constrained slots of a worker. Without one it costs a step nothing, and starts no process."""

    def __init__(
        self,
        tokenizer_path: str,
        vocab_size: int,
        eos_token_ids: list[int],
        command: Sequence[str] | None = None,
        engines: Sequence[GrammarEngine] = (),
        num_slots: int = 0,
    ) -> None:
        """tokenizer_path: folder of the model. command: arguments of Python for a matcher process.

        engines: whose processes start with the first `reset` that has slots; others start by need. num_slots: that the
        shared memory has at least."""
        self._tokenizer_path, self._vocab_size, self._eos = tokenizer_path, vocab_size, eos_token_ids
        self._command, self._engines = command or matcher_client.COMMAND, engines
        self._least_slots = num_slots
        self._device_samples = False
        self._num_processes = 1  # of an engine; slots are spread over them
        self._owners = itertools.count()
        self._slots: dict[int, ConstrainedSlot] = {}
        self._clients: dict[MatcherKey, MatcherClient] = {}
        self._closing: dict[int, tuple[MatcherKey, int]] = {}  # ended slots: their process may still write a mask
        self._num_open: Counter[MatcherKey] = Counter()  # slots
        self._deaths: dict[MatcherKey, int] = {}  # in a row
        self._memory: MaskMemory | None = None
        self._table: Slots | None = None
        self.num_masks = self.num_waits = self.num_restarts = 0
        self._first_masks = [0] * (len(FIRST_MASK_S) + 1)
        self._first_mask_s = 0.0

    def share_memory(self, num_slots: int) -> MaskMemory:
        """A device takes masks and writes tokens from now on, in the memory of `num_slots` slots. No process may run.

        The processes look for tokens, where they otherwise wait for `sampled`, and there are several of an engine,
        because masks must be made within a step. The memory is kept until `close`. Later calls return the same.
        """
        if not self._device_samples:
            assert not self._clients and self._memory is None, "masks are in use already"
            self._device_samples, self._least_slots = True, max(self._least_slots, num_slots)
            self._num_processes = num_processes(usable_cores())
        return self.memory

    def reset(self, table: Slots) -> None:
        """Ends all slots. `table` has the tokens of the slots from now on."""
        for slot in list(self._slots):
            self.end(slot)
        self._table = table
        if not self._device_samples and self._memory is not None and self._memory.num_slots < len(table.live):
            self.close()
        for engine, number in itertools.product(self._engines if len(table.live) else (), range(self._num_processes)):
            self._client(MatcherKey(engine, number))

    def close(self) -> None:
        """Ends all processes."""
        for client in self._clients.values():
            client.close()
        self._clients.clear()
        self._closing.clear()
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    @property
    def memory(self) -> MaskMemory:
        """Made when it is first needed, for the slots of `reset`."""
        if self._memory is None:
            assert self._table is not None, "reset was not called"
            most = self._least_slots if self._device_samples else max(len(self._table.live), self._least_slots)
            self._memory = MaskMemory.create(most, self._vocab_size)
        return self._memory

    @property
    def process_ids(self) -> dict[MatcherKey, int]:
        return {key: client.process.pid for key, client in self._clients.items()}

    def start(self, start: SlotStart) -> None:
        """A slot that has started in the table, with a constraint."""
        constraint = start.sampling.constraint
        assert constraint is not None
        engine = GrammarEngine.AUTO if constraint.grammar is None else constraint.grammar.engine
        if engine is GrammarEngine.AUTO:
            engine = GrammarEngine.GUIDANCE
        rules = rules_of(start.sampling)
        owner = next(self._owners) % ((1 << OWNER_BITS) - 1) + 1
        process = self._choose_process(engine, start.slot)
        self._num_open[process] += 1
        slot = self._slots[start.slot] = ConstrainedSlot(owner, process, rules, start.num_prompt_tokens)
        if start.slot >= self.memory.num_slots:
            cause = f"slot {start.slot} has no mask: this worker has masks for {self.memory.num_slots} slots"
            slot.problem = Problem(cause)
            return
        self.memory.clear(start.slot)
        closing = self._closing.get(start.slot)
        slot.is_deferred = closing is not None and closing[0] != process
        if not slot.is_deferred:
            self._open(start.slot, slot)

    def end(self, slot: int) -> None:
        """Slots without a constraint are ignored."""
        state = self._slots.pop(slot, None)
        if state is None:
            return
        self._num_open[state.process] -= 1
        if not state.is_deferred and state.process in self._clients:
            self._closing[slot] = state.process, state.owner
            self._clients[state.process].send(SlotClose(slot, state.owner))

    def _choose_process(self, engine: GrammarEngine, slot: int) -> MatcherKey:
        """Returns the process with the fewest slots; on a tie the one closing this slot, which need not wait."""
        if self._num_processes > 1 and slot in self._closing:
            self._hear()
        closing, _ = self._closing.get(slot, (None, 0))
        keys = [MatcherKey(engine, number) for number in range(self._num_processes)]
        return min(keys, key=lambda key: (self._num_open[key], key != closing, (key.number - slot) % len(keys)))

    def owner_of(self, slot: int) -> int:
        """The owner of a constrained slot in the shared memory; 0 for other slots."""
        state = self._slots.get(slot)
        return 0 if state is None else state.owner

    def mask(self, slot: int, index: int) -> MaskWords | None:
        """Returns the mask of the token at an index, if it is made. Use it before the token is `sampled`."""
        if not self.memory.has_mask(slot, self._slots[slot].owner, index):
            return None
        self.num_masks += 1
        words: MaskWords = self.memory.masks[slot, index % 2]
        return words

    def problem(self, slot: int) -> Problem | None:
        """The reason that a slot gets no mask; None if it does."""
        return self._slots[slot].problem

    def wait(self, wanted: dict[int, int], has_others: bool) -> None:
        """Waits for the masks of a step's rows for a bounded time. wanted: index of the next token by slot.

        has_others: the step has other rows to sample, so it does not wait for a slot after a late mask.
        """
        missing = self._missing(wanted)
        if missing:
            now = time.monotonic()
            has_others |= len(missing) < len(wanted)
            deadline = now + (PATIENCE_S if has_others else ALONE_S)
            while missing and now < deadline:
                self._hear()
                self._open_lost(missing)  # the table has their tokens, because the host samples them
                missing = self._missing(missing)
                if has_others and not any(self._slots[slot].is_in_time for slot in missing):
                    break
                time.sleep(LOOK_S)
                now = time.monotonic()
            self.num_waits += len(missing)
            self._note_late(missing, now)
        for slot in wanted.keys() - missing.keys():
            self._slots[slot].is_in_time = True

    def late(self, wanted: dict[int, int], launched_s: float) -> None:
        """A step has found no mask for these slots. wanted: index of the next token by slot.

        launched_s: when the step was launched, of `time.perf_counter`. All earlier steps are in the table.
        """
        if not self._device_samples:
            return  # `wait` has noted them
        self.num_waits += len(wanted)
        self._hear()
        settled = [slot for slot in wanted if (at := self._slots[slot].lost_s) is not None and at < launched_s]
        self._open_lost(settled)
        self._note_late(self._missing(wanted), time.monotonic())

    def sampled(self, tokens: Iterable[tuple[int, int, int]]) -> None:
        """The host has sampled tokens: slot, index and token of each."""
        processes = set()
        for slot, index, token in tokens:
            state = self._slots[slot]
            self.memory.write_token(slot, state.owner, index, token)
            processes.add(state.process)
        for process in processes:
            if process in self._clients:
                self._clients[process].send(TokensSampled())

    def count(self, stats: Stats) -> Stats:
        """Returns the worker's counters and the counters of masks."""
        if self._clients:
            self._hear()
        if not (self.num_masks or self.num_waits or self.num_restarts):
            return stats
        return msgspec.structs.replace(
            stats,
            masks_total=self.num_masks,
            mask_waits_total=self.num_waits,
            matcher_restarts_total=self.num_restarts,
            first_mask_counts=list(self._first_masks),
            first_mask_us_total=round(self._first_mask_s * 1e6),
        )

    def _missing(self, wanted: dict[int, int]) -> dict[int, int]:
        """Returns the slots that have neither a mask nor a problem."""
        return {
            slot: index
            for slot, index in wanted.items()
            if not (state := self._slots[slot]).problem and not self.memory.has_mask(slot, state.owner, index)
        }

    def _note_late(self, missing: dict[int, int], now: float) -> None:
        """missing: index of the next token by slot."""
        for slot, index in missing.items():
            state = self._slots[slot]
            state.is_in_time = False
            client, engine = self._clients.get(state.process), state.process.engine
            if client is not None and not client.is_ready:
                state.late_index = 0
                if now - client.started_s > START_S:
                    self._fail(slot, f"the grammar engine {engine} took more than {START_S:.0f} s to load", OUR_FAULT)
            elif state.late_index != index:
                state.late_index, state.late_since_s = index, now
            elif now - state.late_since_s > OVERDUE_S and not state.problem:
                cause = f"the grammar engine {engine} took more than {OVERDUE_S:.0f} s for a mask"
                self._fail(slot, cause, GRAMMARS_FAULT)
                self._restart(state.process)

    def _hear(self) -> None:
        """Reads the processes' answers, and starts ended ones again that are needed."""
        for key, client in list(self._clients.items()):
            for frame in client.receive():
                state = self._slots.get(frame.slot)
                if isinstance(frame, FirstMask):
                    self._deaths.pop(key, None)
                    self._first_masks[bisect_left(FIRST_MASK_S, frame.seconds)] += 1
                    self._first_mask_s += frame.seconds
                elif isinstance(frame, SlotClosed):
                    self._on_closed(frame.slot, frame.owner)
                elif state is not None and state.owner == frame.owner:
                    state.problem = Problem(frame.cause, GRAMMARS_FAULT)
            if not client.is_alive:
                self._on_death(key, client)

    def _on_closed(self, slot: int, owner: int) -> None:
        if self._closing.get(slot, (None, 0))[1] != owner:
            return
        del self._closing[slot]
        state = self._slots.get(slot)
        if state is not None and state.is_deferred:
            state.is_deferred = False
            self._open(slot, state)

    def _on_death(self, key: MatcherKey, client: MatcherClient) -> None:
        open_slots = [slot for slot, state in self._slots.items() if state.process == key and not state.problem]
        was_killed = client.was_killed()
        client.kill()
        log.error("the matcher process of %s ended with %d slots open", key.engine, len(open_slots))
        for slot in open_slots if client.failure else ():
            self._slots[slot].problem = Problem(client.failure)
        deaths = self._deaths.get(key, 0)
        if not was_killed:
            deaths = self._deaths[key] = deaths + 1
        for slot in open_slots:
            state = self._slots[slot]
            tag = int(self.memory.working[slot])
            if was_killed and self._killed_for_s(slot) > KILLED_S:
                cause = f"the process of the grammar engine {key.engine} was killed from outside for {KILLED_S:.0f} s"
                state.problem = Problem(cause)
            elif deaths >= MOST_DEATHS:
                state.problem = Problem(f"the process of the grammar engine {key.engine} ended {deaths} times")
            elif tag >> 32 == state.owner:
                state.strikes = state.strikes + 1 if tag == state.struck_tag else 1
                state.struck_tag = tag
                if state.strikes >= MOST_STRIKES:
                    self._fail(slot, f"the grammar engine {key.engine} ended while it made a mask", GRAMMARS_FAULT)
        self._restart(key)

    def _killed_for_s(self, slot: int) -> float:
        """Returns for how long a slot, whose process was just killed from outside, has met kills at its next token."""
        assert self._table is not None
        state, index, now = self._slots[slot], int(self._table.num_known[slot]), time.monotonic()
        if state.killed_index != index:
            state.killed_index, state.killed_s = index, now
        return now - state.killed_s

    def _fail(self, slot: int, cause: str, status: int) -> None:
        state = self._slots[slot]
        assert self._table is not None
        place = int(self._table.num_known[slot]) - state.num_prompt_tokens + 1
        state.problem = Problem(f"{cause}, at output token {place}", status)

    def _restart(self, key: MatcherKey) -> None:
        """Ends a process, and starts another one in its place if slots need it."""
        if (client := self._clients.pop(key, None)) is not None:
            client.kill()
            for slot, (other, owner) in list(self._closing.items()):
                if other == key:
                    self._on_closed(slot, owner)
        self.num_restarts += 1
        for slot, state in self._slots.items():
            if state.process == key and not state.problem and not state.is_deferred:
                state.is_in_time = False
                if self._device_samples:
                    # steps in flight may find masks and sample; once a later one finds none, no step does
                    state.lost_s = time.perf_counter()
                    self._client(key)
                else:
                    self._open(slot, state)

    def _open_lost(self, slots: Iterable[int]) -> None:
        """Opens slots again after their process ended. The table must have all tokens that were sampled for them."""
        for slot in slots:
            state = self._slots[slot]
            if state.lost_s is not None and not state.problem:
                self._open(slot, state)

    def _open(self, slot: int, state: ConstrainedSlot) -> None:
        state.lost_s = None
        self.memory.clear_tags(slot)
        output_ids = self._known_outputs(slot, state)
        self._client(state.process).send(SlotOpen(slot, state.owner, state.num_prompt_tokens, output_ids, state.rules))

    def _known_outputs(self, slot: int, state: ConstrainedSlot) -> bytes:
        """The output so far. Tokens that were sampled for this owner must be in the table."""
        assert self._table is not None
        ids = self._table.token_ids[slot, state.num_prompt_tokens : int(self._table.num_known[slot])]
        return ids.astype("<u4").tobytes()

    def _client(self, key: MatcherKey) -> MatcherClient:
        """A process. It is started if there is none."""
        if key not in self._clients:
            memory = self.memory
            poll_s = POLL_S if self._device_samples else 0.0
            settings = MatcherSettings(
                key.engine, self._tokenizer_path, self._vocab_size, self._eos, memory.num_slots, poll_s
            )
            self._clients[key] = MatcherClient(settings, memory.fd, self._command)
        return self._clients[key]


def num_processes(cores: int) -> int:
    """Processes of an engine if a device samples: masks must be made within a step, which may take 2 ms."""
    return min(max((cores - OTHER_CORES) // CORES_OF_PROCESS, 1), MOST_PROCESSES)


def rules_of(sampling: Sampling) -> OutputRules:
    """The parameters that a matcher process needs."""
    assert sampling.constraint is not None
    return OutputRules(
        sampling.constraint,
        sampling.allowed_token_ids,
        sampling.min_tokens,
        sampling.ignore_eos,
        sampling.stop_token_ids,
    )
