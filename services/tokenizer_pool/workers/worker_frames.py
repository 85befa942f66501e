"""Frames between a tokenizer's service process, its fork servers and their workers, on sockets of their own."""

import socket
import struct
from typing import BinaryIO

import msgspec

from blockyard.shared.messages import (
    Detokenize,
    Detokenized,
    Frame,
    TextRejected,
    TextsTokenized,
    Tokenize,
    Tokenized,
    TokenizeTexts,
)

Work = Tokenize | TokenizeTexts | Detokenize
Answer = Tokenized | TextsTokenized | Detokenized | TextRejected

LENGTH = struct.Struct("<I")  # before each frame of a worker's stream
OTHER_ENGINE = "other_engine"  # code of a rejection by a grammar worker: another engine may take the grammar


class LocalFrame(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """Base of frames between a tokenizer's processes. It has no fields, as Frame."""


class Task(LocalFrame, frozen=True):
    """One job for the worker."""

    vocab_size: int  # 0: the tokenizer's own
    max_model_len: int  # 0: not known
    work: Work


class Loaded(LocalFrame, frozen=True):
    """The fork server has loaded what its workers need; WorkerStarted of each follows."""

    notes: list[str]


class LoadFailed(LocalFrame, frozen=True):
    exit_code: int
    message: str


class WorkerStarted(LocalFrame, frozen=True):
    """Sent with the service's end of the worker's stream."""

    pid: int


class WorkerEnded(LocalFrame, frozen=True):
    exit_code: int  # negative: killed by this signal
    pid: int
    growth_bytes: int  # of its memory, at most, beyond its server's


class Kill(LocalFrame, frozen=True):
    """Asks the server to end a worker."""

    pid: int


class ModelVocabulary(LocalFrame, frozen=True):
    """The model's vocabulary, for which the server of grammar workers waits before it makes its engines."""

    vocab_size: int  # 0: the tokenizer's own
    eos_token_ids: list[int]


FromServer = Loaded | LoadFailed | WorkerStarted | WorkerEnded
MAX_FRAME_BYTES = 65536  # of a frame of a fork server, or to it

encode = msgspec.msgpack.Encoder().encode


def framed(frame: Frame | LocalFrame) -> bytes:
    """Returns the frame as bytes of a stream, with its length."""
    data = encode(frame)
    return LENGTH.pack(len(data)) + data


def read_frame(stream: BinaryIO) -> bytes | None:
    """Returns the data of the next frame, or None at the end of the stream."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    data = stream.read(length)
    return data if len(data) == length else None


def pair(kind: socket.SocketKind) -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, kind)
