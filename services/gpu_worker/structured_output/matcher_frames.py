"""Control frames between a worker and a matcher process, over a stream socket: 4 bytes of length, then the frame."""

import socket
from typing import Generic, TypeVar

import msgspec

from blockyard.shared.messages import OutputConstraint
from blockyard.shared.messages.base import FrameStruct
from blockyard.shared.messages.grammars import GrammarEngine

READ_BYTES = 1 << 16
LENGTH_BYTES = 4


class OutputRules(FrameStruct, frozen=True):
    """All that decides the masks of a slot, besides its output."""

    constraint: OutputConstraint
    allowed_token_ids: list[int]  # empty is all
    min_tokens: int
    ignore_eos: bool
    stop_token_ids: list[int]


class ControlFrame(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """Base of the frames. Both ends are of one version, because the worker starts the process."""


class MatcherSettings(ControlFrame, frozen=True):
    """The first frame to a process."""

    engine: GrammarEngine
    tokenizer_path: str  # folder of the model
    vocab_size: int
    eos_token_ids: list[int]
    num_slots: int  # of the shared memory
    poll_s: float  # between looks for tokens while slots are open, if a device writes them; 0: TokensSampled tells


class SlotOpen(ControlFrame, frozen=True):
    """A slot starts. Its masks begin with the one for the token behind `output_ids`."""

    slot: int
    owner: int
    num_prompt_tokens: int
    output_ids: bytes  # uint32 each
    rules: OutputRules


class SlotClose(ControlFrame, frozen=True):
    """A slot has ended."""

    slot: int
    owner: int


class TokensSampled(ControlFrame, frozen=True):
    """The worker has written tokens of some slots to the shared memory."""


class EngineReady(ControlFrame, frozen=True):
    """The engine is loaded."""


class EngineFailed(ControlFrame, frozen=True):
    """The engine cannot be loaded: no slot will have masks. The process ends."""

    cause: str


class FirstMask(ControlFrame, frozen=True):
    """A slot has its first mask."""

    slot: int
    owner: int
    seconds: float  # since the process has read SlotOpen


class SlotClosed(ControlFrame, frozen=True):
    """Answers SlotClose: the process writes no mask of this slot any more."""

    slot: int
    owner: int


class SlotFailed(ControlFrame, frozen=True):
    """A slot gets no more masks."""

    slot: int
    owner: int
    cause: str


ToMatcher = MatcherSettings | SlotOpen | SlotClose | TokensSampled
FromMatcher = EngineReady | EngineFailed | FirstMask | SlotClosed | SlotFailed

In = TypeVar("In")


class FrameSocket(Generic[In]):
    """One end of the socket. Neither end ever waits for the other: what does not fit is kept until `flush`."""

    def __init__(self, sock: socket.socket, decoder: "msgspec.msgpack.Decoder[In]") -> None:
        sock.setblocking(False)
        self.sock, self.is_open = sock, True
        self._decoder, self._encoder = decoder, msgspec.msgpack.Encoder()
        self._inbound, self._outbound = bytearray(), bytearray()

    @property
    def has_unsent(self) -> bool:
        return bool(self._outbound)

    def send(self, frame: ControlFrame) -> None:
        data = self._encoder.encode(frame)
        self._outbound += len(data).to_bytes(LENGTH_BYTES, "little") + data
        self.flush()

    def flush(self) -> None:
        """Sends what the socket takes."""
        while self._outbound and self.is_open:
            try:
                sent = self.sock.send(self._outbound)
            except BlockingIOError:
                return
            except OSError:
                self.is_open = False
                return
            del self._outbound[:sent]

    def receive(self) -> list[In]:
        """Returns the frames that are there. `is_open` is False once the other end is closed."""
        self.flush()
        while self.is_open:
            try:
                data = self.sock.recv(READ_BYTES)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            self.is_open = bool(data)
            self._inbound += data
            if len(data) < READ_BYTES:
                break
        frames: list[In] = []
        at = 0
        while len(self._inbound) - at >= LENGTH_BYTES:
            size = int.from_bytes(self._inbound[at : at + LENGTH_BYTES], "little")
            if len(self._inbound) - at - LENGTH_BYTES < size:
                break
            frames.append(self._decoder.decode(self._inbound[at + LENGTH_BYTES : at + LENGTH_BYTES + size]))
            at += LENGTH_BYTES + size
        del self._inbound[:at]
        return frames

    def close(self) -> None:
        self.is_open = False
        self.sock.close()
