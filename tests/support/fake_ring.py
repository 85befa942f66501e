"""A ring in one process for tests and benchmarks of the gateway: its links, with members that answer.

A token is a byte of UTF-8. An answer is the words `w0 w1 w2 ...`, one per token, or that of `script`, which ends it
with the text `END`.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
from fake_links import FakeLinks

from blockyard.services.tokenizer_pool.token_spans import packed_offsets
from blockyard.shared.bus.member_list import Event, Gone, Joined
from blockyard.shared.messages import (
    DEFAULT_SETTINGS,
    Accepted,
    Cancel,
    Control,
    Controlled,
    DescribeTokenizer,
    Detokenize,
    Detokenized,
    FinishReason,
    Frame,
    GatewayIn,
    Generate,
    Member,
    ModelCard,
    ModelSettings,
    PoolingCard,
    QueueCapacity,
    Refused,
    Role,
    StatsRequest,
    StatsResponse,
    TextBatch,
    TextDelta,
    TextLogprobs,
    TextRejected,
    Tokenize,
    Tokenized,
    TokenizerDescription,
)
from blockyard.shared.token_ids import pack, unpack

Receive = Callable[[int, Event | GatewayIn], None]

TOKENIZER, SCHEDULER, WORKER, DETOKENIZER = 1, 2, 3, 4
END = "\x00end of sequence"  # of a script
REJECTED = "rejected"  # a template raises for a prompt that has this word
CARD = ModelCard(["tiny", "tiny-alias"], "/models/tiny", 256, 300, 1_700_000_000, [299])


def member(role: Role, incarnation: int, ready: bool = True, card: ModelCard | None = None) -> Member:
    return Member(role.value, role, incarnation, f"ipc:///{incarnation}", "tiny", ready, "ready", card=card)


MEMBERS = (
    member(Role.TOKENIZER_POOL, TOKENIZER),
    member(Role.SCHEDULER, SCHEDULER, card=CARD),
    member(Role.GPU_WORKER, WORKER),
    member(Role.DETOKENIZER, DETOKENIZER),
)


def words(_: str, index: int) -> str:
    """The default answer: token `index` of any choice."""
    return f"w{index} "


@dataclass
class Running:
    """One request in the batch."""

    frame: Generate
    peer: int
    done: dict[int, int] = field(default_factory=dict)  # choice -> tokens so far
    prompt_sent: bool = False


class FakeRing(FakeLinks):
    """Answers on the running loop. Tests set its attributes, read `sent`, and may send frames themselves."""

    def __init__(
        self,
        settings: ModelSettings = DEFAULT_SETTINGS,
        max_model_len: int = CARD.max_model_len,
        pooling: PoolingCard | None = None,
    ) -> None:
        """All are of the model. pooling: None: it generates text."""
        super().__init__(Member("api_gateway", Role.API_GATEWAY, 99, "ipc:///99"), *MEMBERS)
        card = msgspec.structs.replace(CARD, settings=settings, max_model_len=max_model_len, pooling=pooling)
        self.members[SCHEDULER] = member(Role.SCHEDULER, SCHEDULER, card=card)
        self.receive: Receive = lambda peer, event: None
        self.running: dict[str, Running] = {}
        self.capacity = QueueCapacity(100, 100_000)
        self.refuse: Callable[[Generate], Refused | None] = lambda frame: None
        self.control: Callable[[Control], Controlled] = lambda frame: Controlled(frame.request_id, 200, "", 0, False)
        self.silent: set[Role] = set()  # roles that answer nothing
        self.step_s = 0.0
        self.script = words
        self.fail_at: int | None = None  # token at which a choice fails
        self.finish_at: tuple[int, FinishReason, str | None] | None = None  # token at which a choice ends so
        self.kv_transfer_params = b""  # of the connector, with the end of each choice
        self.stamp_s = 0.0
        self.detokenizer = DETOKENIZER  # named in Accepted
        self.rejected = REJECTED
        self._stepping = False

    def join_all(self) -> None:
        for m in list(self.members.values()):
            self.receive(m.incarnation, Joined(m))

    def join(self, m: Member) -> None:
        self.members[m.incarnation] = m
        self.receive(m.incarnation, Joined(m))

    def lose(self, incarnation: int) -> None:
        self.receive(incarnation, Gone(self.members.pop(incarnation)))

    def frames(self, kind: type[Frame]) -> list[Frame]:
        return [frame for _, frame in self.sent if isinstance(frame, kind)]

    def send(self, to: int, frame: Frame) -> bool:
        if not super().send(to, frame):
            return False
        if self.members[to].role not in self.silent:
            asyncio.get_running_loop().call_soon(self._answer, to, frame)
        return True

    def _answer(self, to: int, frame: Frame) -> None:
        match frame:
            case Tokenize():
                self.receive(to, tokenized(frame, self.rejected))
            case Detokenize():
                self.receive(
                    to, Detokenized(frame.request_id, bytes(unpack(frame.token_ids)).decode("utf-8", "replace"))
                )
            case DescribeTokenizer():
                settings = b'{"tokenizer_class":"Bytes","chat_template":"{{ messages }}"}'
                self.receive(to, TokenizerDescription(frame.request_id, settings))
            case Generate():
                self.admit(to, frame)
            case Control():
                self.receive(to, self.control(frame))
            case StatsRequest():
                self.receive(to, StatsResponse(frame.request_id, self.members[to].stats))
            case Cancel():
                running = self.running.get(frame.request_id)
                if running is not None and running.frame.attempt <= frame.attempt:
                    del self.running[frame.request_id]

    def admit(self, to: int, frame: Generate) -> None:
        if refused := self.refuse(frame):
            self.receive(to, refused)
            return
        done = {c.index: len(c.output_ids) // 4 for c in frame.choices}
        self.running[frame.request_id] = Running(frame, to, done)
        self.receive(to, Accepted(frame.request_id, frame.attempt, self.detokenizer, self.capacity))
        if not self._stepping:
            self._stepping = True
            asyncio.get_running_loop().call_later(self.step_s, self.step)

    def step(self) -> None:
        """One token for every choice in the batch, one frame for all of them."""
        deltas = [d for running in list(self.running.values()) for d in self._deltas(running)]
        if Role.DETOKENIZER not in self.silent and deltas:
            self.receive(self.detokenizer, TextBatch(deltas, self.stamp_s))
        self._stepping = bool(self.running)
        if self._stepping:
            asyncio.get_running_loop().call_later(self.step_s, self.step)

    def _deltas(self, running: Running) -> list[TextDelta]:
        frame = running.frame
        out = [self._delta(running, choice) for choice in list(running.done)]
        if not running.prompt_sent and frame.sampling.num_prompt_logprobs is not None:
            running.prompt_sent = True
            entries = [logprobs(t, frame.sampling.num_prompt_logprobs) for t in unpack(frame.prompt_ids)[1:]]
            out[0] = msgspec.structs.replace(out[0], first_prompt=1, prompt_logprobs=entries)
        if not running.done:
            self.running.pop(frame.request_id, None)
        return out

    def _delta(self, running: Running, choice: int) -> TextDelta:
        frame, index = running.frame, running.done[choice]
        text = self.script(frame.request_id, index)
        sampling, finish, detail, reason = frame.sampling, None, "", None
        if sampling.max_tokens == 0:  # the prompt fills the context: nothing is sampled
            del running.done[choice]
            return TextDelta(frame.request_id, frame.attempt, choice, 0, [], "", FinishReason.LENGTH)
        if text == END:
            finish, text = FinishReason.STOP, ""
        if self.fail_at == index:
            finish, detail, text = FinishReason.FAILED, "the worker stumbled", ""
        elif finish is None and self.finish_at is not None and self.finish_at[0] == index:
            _, finish, reason = self.finish_at
        elif finish is None and any(stop in text for stop in frame.text.stop):
            reason = next(stop for stop in frame.text.stop if stop in text)
            finish, text = FinishReason.STOP, text.partition(reason)[0]
        elif finish is None and index + 1 >= sampling.max_tokens:
            finish = FinishReason.LENGTH
        running.done[choice] += 1
        if finish is not None:
            del running.done[choice]
        token = 97 + index % 26
        shown = [] if sampling.num_logprobs is None else [logprobs(token, sampling.num_logprobs)]
        if listed := sampling.logprob_token_ids:
            shown = [with_candidates(one, listed) for one in shown]
        return TextDelta(
            frame.request_id,
            frame.attempt,
            choice,
            index,
            [token],
            text,
            finish,
            reason,
            detail,
            shown,
            cached_tokens=3,
            queued_s=None if index else 0.004,
            kv_transfer_params=self.kv_transfer_params if finish is not None else b"",
        )


def tokenized(frame: Tokenize, rejected: str = REJECTED) -> Tokenized | TextRejected:
    if frame.token_ids is not None:
        data, text = frame.token_ids, bytes(t % 256 for t in unpack(frame.token_ids)).decode("utf-8", "replace")
    else:
        text = frame.text if frame.text is not None else (frame.messages or b"").decode()
        if rejected in text:
            return TextRejected(frame.request_id, "chat_template", "the template raised")
        if 0 < frame.max_tokens < len(text):  # each token is a byte
            field = "prompt" if frame.messages is None else "messages"
            code = "context_length_exceeded"
            said = f"This model's maximum context length is {frame.max_tokens} tokens."
            return TextRejected(frame.request_id, field, said, code, len(text), frame.max_tokens)
        data = pack(list(text.encode()))
    pieces = [chr(t) for t in unpack(data)] if frame.want_pieces else []
    spans = packed_offsets((i, i + 1) for i in range(len(text))) if frame.want_offsets and not frame.token_ids else b""
    bad = [list(word.encode()) for word in frame.bad_words]
    opened = next((marker == frame.reasoning_markers[0] for marker in frame.reasoning_markers if marker in text), None)
    return Tokenized(
        frame.request_id,
        data,
        b"\0" * (len(data) // 64 * 16),
        bad,
        text if frame.want_text else "",
        pieces,
        reasoning_opened=opened,
        grammar=frame.grammar,
        begin_after=list(frame.reasoning_end.encode()),
        inner_end=298 if frame.inner_end else None,
        offsets=spans,
        assistant_mask=own_tokens(text) if frame.want_assistant_mask else b"",
    )


def own_tokens(text: str) -> bytes:
    """1 for the content of an assistant's last message, as it is in JSON."""
    _, found, content = text.rpartition('"role":"assistant","content":"')
    length = content.find('"') if found else 0
    at = len(text) - len(content)
    return bytes(int(at <= i < at + length) for i in range(len(text)))


def with_candidates(entry: TextLogprobs, listed: list[int]) -> TextLogprobs:
    """The entry with these candidates, whose values tell their ids."""
    texts, values = [bytes([i]) for i in listed], [-float(i) for i in listed]
    return msgspec.structs.replace(entry, top_ids=listed, top_tokens=texts, top_logprobs=values)


def logprobs(token: int, num: int) -> TextLogprobs:
    """The sampled token is the second likeliest, if as many are asked for."""
    tops = [1, token, 2, 3, 4][:num]
    return TextLogprobs(
        token, bytes([token]), -1.5, 2, tops, [bytes([t]) for t in tops], [-0.5 - i for i in range(num)]
    )
