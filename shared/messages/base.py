"""Base classes of all frames, the roles of members, and the handshake of a link."""

import enum

import msgspec

# 6: packed steps; 5: blocks of vectors; 3, 4: unused fields left; 2: frames above `sockets.PART_BYTES` travel in parts
PROTOCOL_VERSION = 7
NO_TOKEN = 0xFFFFFFFF  # stands for "no token" in a list of token ids


class Role(enum.StrEnum):
    """The service that a member runs; the values are the folder names under `services`."""

    API_GATEWAY = "api_gateway"
    TOKENIZER_POOL = "tokenizer_pool"
    SCHEDULER = "scheduler"
    GPU_WORKER = "gpu_worker"
    DETOKENIZER = "detokenizer"
    LAUNCHER = "launcher"


class FinishReason(enum.IntEnum):
    STOP = 0
    LENGTH = 1
    CANCELLED = 2  # the client cancelled; never used for our own faults
    FAILED = 3  # our fault or the input's: the gateway answers with an error
    REPETITION = 4  # the output repeats itself, as the request's `RepetitionDetection` says


FAULTS = (FinishReason.CANCELLED, FinishReason.FAILED)  # the choice has no answer


class FrameStruct(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base of the structs inside frames. It has no fields, for the same reason as `Frame`."""


class Frame(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """Base of all frames. It has no fields: one added here would shift every subclass's array."""


class Hello(Frame, frozen=True):
    """First frame of a link, in both directions. A receiver that is not `to` answers and drops all later frames."""

    version: int
    incarnation: int  # the sender's
    name: str
    to: int = 0  # incarnation of the intended receiver; 0 in answers
