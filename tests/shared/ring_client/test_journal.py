"""The journal with lost, repeated, delayed and reordered frames, and with members that die."""

from dataclasses import dataclass, field

import msgspec
import pytest
from fake_links import FakeLinks
from fake_ring import CARD, member
from hypothesis import given, settings
from hypothesis import strategies as st

from blockyard.shared.errors import RequestError
from blockyard.shared.messages import (
    Accepted,
    Cancel,
    FinishReason,
    Generate,
    Member,
    QueueCapacity,
    Refused,
    Role,
    Sampling,
    TextBatch,
    TextDelta,
    TextLogprobs,
    TextOptions,
)
from blockyard.shared.ring_client.fanout import Fanout
from blockyard.shared.ring_client.journal import ChoiceLog, Journal, JournalEntry
from blockyard.shared.ring_client.metrics.meters import Meters
from blockyard.shared.ring_client.open_entry import MAX_GAPS
from blockyard.shared.ring_client.recovery.dispatch import Dispatch
from blockyard.shared.ring_client.recovery.recovery import Recovery
from blockyard.shared.ring_client.schedulers import Schedulers
from blockyard.shared.token_ids import unpack

ROOM = QueueCapacity(10, 1000)
STALL_S = 5.0


def token(attempt: int, choice: int, index: int) -> int:
    """Attempts sample different ids before anything was delivered, as after a tie."""
    return 10_000 * attempt + 1000 * choice + index


def text_of(ids: list[int]) -> str:
    return "".join(f"<{i}>" for i in ids)


def early_text(ids: list[int]) -> str:
    """Returns the text of these ids: every third id's text is held back until the next."""
    return text_of(ids[:-1] if len(ids) % 3 == 2 else ids)


@dataclass
class Reader:
    """A sink."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    finals: int = 0

    def push(self, delta: TextDelta, now: float, stamp_s: float) -> None:
        assert self.finals == 0, "text after the final"
        self.ids += delta.token_ids
        self.text += delta.text
        self.finals += delta.finish is not None


@dataclass
class Caller:
    """An owner."""

    num_accepted: int = 0
    num_begun: int = 0
    num_finished: int = 0
    error: RequestError | None = None

    def accepted(self, entry: JournalEntry) -> None:
        self.num_accepted += 1

    def begun(self, entry: JournalEntry) -> None:
        self.num_begun += 1

    def finished(self, entry: JournalEntry) -> None:
        self.num_finished += 1

    def failed(self, entry: JournalEntry, error: RequestError) -> None:
        self.error = error


class World:
    """A gateway's journal and dispatch, a scheduler and a detokenizer that can die, and the deltas in flight."""

    def __init__(self, num_choices: int, num_tokens: int, bare_final: bool = False) -> None:
        self.now = 100.0
        self.bare_final = bare_final  # the final delta has no ids, as where a stop string was found late
        self.known: dict[tuple[int, int], list[int]] = {}  # attempt, choice -> ids it began with
        self.num_tokens = num_tokens
        self.links = FakeLinks(Member("api_gateway", Role.API_GATEWAY, 99, "ipc:///99"))
        self.journal, self.schedulers, self.meters = Journal(), Schedulers([]), Meters("tiny")
        self.dispatch = Dispatch(self.links, self.journal, self.schedulers, self.meters)
        self.recovery = Recovery(self.links, self.journal, self.schedulers, self.dispatch, STALL_S)
        self.fanout = Fanout(self.links, self.journal, self.dispatch, self.recovery, self.meters)
        self.caller, self.readers = Caller(), [Reader() for _ in range(num_choices)]
        self.scheduler, self.detokenizer = 10, 1000
        self.wire: list[TextDelta] = []  # in order
        self.late: list[TextDelta] = []
        self.seen = 0
        self.join_scheduler()
        frame = Generate("r", 0, "tiny", b"\1\0\0\0", b"", Sampling(num_tokens), TextOptions(), [])
        logs = [ChoiceLog(i, r) for i, r in enumerate(self.readers)]
        self.entry = JournalEntry(frame, logs, self.caller, self.now)
        self.dispatch.open(self.entry, self.now)
        self.serve()

    def join_scheduler(self) -> None:
        m = member(Role.SCHEDULER, self.scheduler, card=CARD)
        self.links.members[self.scheduler] = m
        self.schedulers.changed(m)
        self.recovery.changed(m, self.now)

    def lose(self, role: Role, incarnation: int) -> None:
        m = self.links.members.pop(incarnation, None) or member(role, incarnation)
        self.schedulers.gone(m, self.now)
        self.recovery.gone(m, self.now)
        self.serve()

    def serve(self) -> None:
        """The ring accepts new requests and sends the remaining deltas of each choice."""
        sent, self.seen = self.links.sent[self.seen :], len(self.links.sent)
        for to, frame in sent:
            if isinstance(frame, Generate) and to in self.links.members:
                self.recovery.accepted(to, Accepted("r", frame.attempt, self.detokenizer, ROOM), self.now)
                for choice in frame.choices:
                    self.write(frame.attempt, choice.index, unpack(choice.output_ids), choice.chars_sent)
        if len(self.links.sent) > self.seen:
            self.serve()

    def write(self, attempt: int, choice: int, known: list[int], chars_sent: int) -> None:
        reader = self.readers[choice]
        assert reader.finals == 0, "asked for a choice that had ended"
        assert known == reader.ids and chars_sent == len(reader.text) == len(early_text(known))
        self.known[attempt, choice] = known
        ids = known + [token(attempt, choice, i) for i in range(len(known), self.num_tokens)]
        for i in range(len(known), self.num_tokens):
            last = i == self.num_tokens - 1 and not self.bare_final
            text = (text_of if last else early_text)(ids[: i + 1])[len(early_text(ids[:i])) :]
            finish = FinishReason.LENGTH if last else None
            self.wire.append(TextDelta("r", attempt, choice, i, [ids[i]], text, finish))
        if self.bare_final:
            rest = text_of(ids)[len(early_text(ids)) :]
            self.wire.append(TextDelta("r", attempt, choice, self.num_tokens, [], rest, FinishReason.STOP))

    def check(self, choice: int) -> None:
        """Each id is of an attempt that knew all ids before it."""
        ids = self.readers[choice].ids
        for i, drawn in enumerate(ids):
            attempt = drawn // 10_000
            known = self.known[attempt, choice]
            assert ids[: len(known)] == known
            assert drawn == token(attempt, choice, i)
            assert all(before // 10_000 == attempt for before in ids[len(known) : i])

    def deliver(self, *deltas: TextDelta) -> None:
        self.now += 0.01
        self.fanout.text(TextBatch(list(deltas)), self.now)
        self.serve()

    def act(self, what: str, which: int) -> None:
        if what == "detokenizer dies":
            dead, self.detokenizer = self.detokenizer, self.detokenizer + 1
            self.wire = []  # it had them
            self.lose(Role.DETOKENIZER, dead)
        elif what == "scheduler dies":
            dead, self.scheduler = self.scheduler, self.scheduler + 1
            self.lose(Role.SCHEDULER, dead)
        elif what == "scheduler joins":
            self.join_scheduler()
            self.serve()
        elif what == "stall":
            self.now += STALL_S + 1
            self.recovery.tick(self.now)
            self.dispatch.retry(self.now)
            self.serve()
        elif what == "path lost":
            self.wire = []
            self.recovery.path_lost(self.scheduler, (self.detokenizer, 99)[which % 2], self.now)
        elif what == "retry":
            self.dispatch.retry(self.now)
            self.serve()
        elif what == "late" and self.late:
            self.deliver(self.late.pop(which % len(self.late)))
        elif self.wire:
            self.on_wire(what, which)

    def on_wire(self, what: str, which: int) -> None:
        if what == "deliver":
            self.deliver(self.wire.pop(0))
        elif what == "double":
            delta = self.wire.pop(0)
            self.late.append(delta)
            self.deliver(delta, delta)
        elif what == "swap":
            self.deliver(self.wire.pop(which % len(self.wire)))
        elif what == "delay":
            self.late.append(self.wire.pop(0))
        elif what == "lose":
            self.wire.pop(0)

    def settle(self) -> None:
        """From now on no frame is lost; delayed frames arrive."""
        self.join_scheduler()
        for _ in range(50):
            while self.wire:
                self.deliver(self.wire.pop(0))
            while self.late:
                self.deliver(self.late.pop())
            if not self.journal.entries:
                return
            self.act("stall", 0)


ACTIONS = ["deliver", "double", "swap", "delay", "lose", "late", "stall"]
ACTIONS += ["detokenizer dies", "scheduler dies", "scheduler joins", "path lost", "retry"]


@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(1, 7),
    st.booleans(),
    st.lists(st.tuples(st.sampled_from(ACTIONS + ["deliver"] * 4), st.integers(0, 20)), max_size=60),
)
def test_every_token_once_and_one_final(
    num_choices: int, num_tokens: int, bare_final: bool, actions: list[tuple[str, int]]
) -> None:
    world = World(num_choices, num_tokens, bare_final)
    for what, which in actions:
        if world.entry.gaps < MAX_GAPS - 1 or what not in ("lose", "swap", "delay"):  # worse than that is given up
            world.act(what, which)
    world.settle()
    assert world.caller.error is None
    assert (world.caller.num_accepted, world.caller.num_finished) == (1, 1)
    for choice, reader in enumerate(world.readers):
        assert len(reader.ids) == num_tokens
        assert reader.text == text_of(reader.ids)
        assert reader.finals == 1
        world.check(choice)
    assert world.journal.entries == {} and world.dispatch.waiting == {}
    assert world.meters.output_tokens == num_choices * num_tokens


@pytest.mark.parametrize("lost", [Role.DETOKENIZER, Role.SCHEDULER])
def test_a_lost_member_is_answered_at_once(lost: Role) -> None:
    world = World(1, 5)
    for _ in range(3):
        world.deliver(world.wire.pop(0))
    if lost == Role.SCHEDULER:
        world.scheduler = 11
        world.join_scheduler()
        world.lose(Role.SCHEDULER, 10)
    else:
        world.detokenizer = 1001
        world.lose(Role.DETOKENIZER, 1000)
    to, resend = world.links.sent[-1]
    assert isinstance(resend, Generate) and to == world.scheduler and resend.attempt == 1
    assert [(unpack(c.output_ids), c.chars_sent) for c in resend.choices] == [([0, 1, 2], 9)]
    world.settle()
    assert world.readers[0].ids == [0, 1, 2, 10_003, 10_004]


@pytest.mark.parametrize(("scheduler", "member", "hit"), [(10, 1000, 1), (10, 99, 1), (10, 1001, 0), (11, 99, 0)])
def test_a_lost_path_is_asked_for_again_with_the_next_round(scheduler: int, member: int, hit: int) -> None:
    world = World(1, 5)
    world.deliver(world.wire.pop(0))
    world.recovery.path_lost(scheduler, member, world.now)
    assert world.entry.attempt == 0
    world.act("retry", 0)
    world.act("retry", 0)
    assert world.entry.attempt == hit
    world.settle()
    assert len(world.readers[0].ids) == 5


def test_a_request_that_ends_before_it_is_sent_again_is_not() -> None:
    world = World(1, 3)
    world.recovery.path_lost(10, 1000, world.now)
    world.deliver(*world.wire)
    world.wire = []
    assert world.caller.num_finished == 1
    world.act("retry", 0)
    assert len(world.links.sent) == 1


def test_text_of_ids_delivered_before_counts_once_an_attempt() -> None:
    """A detokenizer that reopens a stream may know more text of the same ids than was delivered."""
    world = World(1, 5)
    world.deliver(world.wire.pop(0))
    world.deliver(world.wire.pop(0))
    more = TextDelta("r", 0, 0, 2, [], "more")
    world.deliver(more, more)
    assert world.readers[0].text == "<0>more" and world.entry.choices[0].chars_sent == 7


def scored(*positions: int) -> list[TextLogprobs]:
    return [TextLogprobs(p, b"x", -1.0, 1, [], [], []) for p in positions]


def test_log_probabilities_of_the_prompt_are_taken_once() -> None:
    """They arrive again after a repetition, from any choice and any position."""
    world = World(2, 3)
    world.deliver(TextDelta("r", 0, 0, 0, [], "", first_prompt=1, prompt_logprobs=scored(1, 2, 3)))
    world.deliver(TextDelta("r", 0, 1, 0, [], "", first_prompt=1, prompt_logprobs=scored(1, 2)))
    world.deliver(TextDelta("r", 0, 1, 0, [], "", first_prompt=3, prompt_logprobs=scored(3, 4)))
    world.lose(Role.DETOKENIZER, world.detokenizer)
    world.deliver(TextDelta("r", 1, 0, 0, [], "", first_prompt=1, prompt_logprobs=scored(1, 2, 3, 4, 5)))
    assert [entry.token_id for entry in world.entry.prompt_logprobs] == [1, 2, 3, 4, 5]
    assert world.entry.attempt == 1 and world.entry.gaps == 0
    world.deliver(TextDelta("r", 1, 0, 0, [], "", first_prompt=7, prompt_logprobs=scored(7)))  # 6 is missing
    assert [entry.token_id for entry in world.entry.prompt_logprobs] == [1, 2, 3, 4, 5] and world.entry.attempt == 2


def test_frames_of_the_unknown_are_answered_with_one_cancel() -> None:
    world = World(1, 3)
    stray = TextDelta("nobody", 4, 0, 0, [5], "x")
    world.deliver(stray, stray)
    world.deliver(stray)
    assert [f for _, f in world.links.sent if isinstance(f, Cancel)] == [Cancel("nobody", 4)]
    world.now += 2
    world.deliver(stray)
    assert len([f for _, f in world.links.sent if isinstance(f, Cancel)]) == 2
    world.recovery.accepted(10, Accepted("nobody", 7, 1000, ROOM), world.now)
    assert world.links.sent[-1] == (10, Cancel("nobody", 7))


def test_closing_cancels_what_runs_and_only_that() -> None:
    world = World(2, 3)
    world.dispatch.close(world.entry)
    world.dispatch.close(world.entry)
    assert [f for _, f in world.links.sent if isinstance(f, Cancel)] == [Cancel("r", 0)]
    world = World(1, 3)
    world.settle()
    world.dispatch.close(world.entry)
    assert [f for _, f in world.links.sent if isinstance(f, Cancel)] == []


@pytest.mark.parametrize(("status", "retry"), [(429, True), (503, True), (400, False)])
def test_a_repetition_that_is_refused_waits_or_fails(status: int, retry: bool) -> None:
    world = World(1, 3)
    world.deliver(world.wire.pop(0))
    world.lose(Role.SCHEDULER, world.scheduler)
    world.scheduler, world.wire = 11, []
    m = member(Role.SCHEDULER, 11, card=CARD)
    world.links.members[11] = m
    world.schedulers.changed(m)
    world.recovery.changed(m, world.now)
    full = Refused("r", world.entry.attempt, status, "", "no", msgspec.structs.replace(ROOM, retry_after_s=2.0))
    world.seen = len(world.links.sent)
    world.recovery.refused(11, full, world.now)
    assert (world.caller.error is None) is retry
    if retry:
        world.now += 1
        world.dispatch.retry(world.now)
        assert len(world.links.sent) == world.seen, "sent again before its time"
        world.now += 2
        world.dispatch.retry(world.now)
        world.serve()
        world.settle()
        assert world.readers[0].finals == 1 and world.caller.num_finished == 1


def test_a_ring_that_always_loses_is_given_up() -> None:
    world = World(1, 4)
    for _ in range(MAX_GAPS + 1):
        world.wire.pop(0)
        world.deliver(world.wire[0])
        world.wire = [d for d in world.wire if d.attempt == world.entry.attempt]
    assert world.caller.error is not None and world.caller.error.status == 500
    assert world.journal.entries == {}


@pytest.mark.parametrize("bad", [-1, 2**32])
def test_an_id_that_cannot_be_one_costs_its_frame_only(bad: int) -> None:
    world = World(1, 3)
    world.deliver(TextDelta("r", 0, 0, 0, [5, bad], "x"))
    assert world.readers[0].ids == [] and world.entry.attempt == 1
    world.settle()
    assert len(world.readers[0].ids) == 3 and world.caller.num_finished == 1


def test_an_answer_without_a_token_ends_too() -> None:
    """Accepted may be late, and the text end at once."""
    world = World(1, 3)
    world.caller.num_accepted, world.entry.accepted = 0, False
    world.deliver(TextDelta("r", 0, 0, 0, [], "", FinishReason.STOP))
    assert (world.caller.num_accepted, world.caller.num_finished, world.readers[0].finals) == (1, 1, 1)
    assert sum(world.meters.ttft.counts) == 0


def test_cached_tokens_count_whichever_attempt_brings_the_first_token() -> None:
    world = World(1, 4)
    world.wire.clear()  # the first token is lost with its detokenizer
    world.dispatch.resend(world.entry, world.now)
    for first, cached in ((0, 16), (1, 99)):
        delta = TextDelta("r", 1, 0, first, [token(1, 0, first)], "", cached_tokens=cached)
        world.fanout.text(TextBatch([delta]), world.now)
    assert world.entry.cached_tokens == 16
