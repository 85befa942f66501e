"""Frames between a tokenizer's service process, its fork server and its text worker, on sockets of their own."""

import socket
import struct
from typing import BinaryIO

import msgspec

from blockyard.shared.messages import Detokenize, Detokenized, Frame, TextRejected, Tokenize, Tokenized

Work = Tokenize | Detokenize
Answer = Tokenized | Detokenized | TextRejected

LENGTH = struct.Struct("<I")  # before each frame of a worker's stream


class Local(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """Base of the frames that stay within a tokenizer. Without fields, as Frame."""


class Task(Local, frozen=True):
    """One job for the worker."""

    vocab_size: int  # 0: the tokenizer's own
    max_model_len: int  # 0: not known
    work: Work


class TokenizerLoaded(Local, frozen=True):
    """The tokenizer can be used; the first worker follows."""

    notes: list[str]


class LoadFailed(Local, frozen=True):
    exit_code: int
    message: str


class WorkerStarted(Local, frozen=True):
    """Comes with the service's end of the worker's stream."""

    pid: int


class WorkerEnded(Local, frozen=True):
    exit_code: int  # or minus the signal


FromServer = TokenizerLoaded | LoadFailed | WorkerStarted | WorkerEnded

encode = msgspec.msgpack.Encoder().encode


def framed(frame: Frame | Local) -> bytes:
    """As it travels on a stream."""
    data = encode(frame)
    return LENGTH.pack(len(data)) + data


def read_frame(stream: BinaryIO) -> bytes | None:
    """The next one's data; None at the end."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    data = stream.read(length)
    return data if len(data) == length else None


def pair(kind: socket.SocketKind) -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, kind)
