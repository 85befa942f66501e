"""Traces: JSON lines of requests with arrival times, and the Generate frames made from them."""

import struct
from collections.abc import Iterable, Iterator
from hashlib import shake_128
from pathlib import Path

import msgspec

from blockyard.shared.block_hashes import HASH_BYTES
from blockyard.shared.errors import ConfigError
from blockyard.shared.messages import ChoiceState, Generate, Sampling, TextOptions

# These tokens never repeat, so that requests share only the prefixes that a trace asks for.
GROUP_IDS, PROMPT_IDS, OUTPUT_IDS = 0, 1 << 30, 1 << 31


class TraceRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    arrival_s: float
    prompt_tokens: int
    output_tokens: int  # for each choice
    max_tokens: int | None = None  # None: `output_tokens`
    tenant: str = ""
    priority: int = 0
    prefix_group: str = ""  # requests of one group begin with the same tokens
    prefix_tokens: int | None = None  # how many of them; None: the shorter of the two prompts
    n: int = 1
    batch_line: bool = False  # of a batch file: every other request comes before it

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "output_tokens", "n"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_tokens is not None and self.max_tokens < self.output_tokens:
            raise ValueError(f"max_tokens {self.max_tokens} is less than output_tokens {self.output_tokens}")
        if self.prefix_tokens is not None and not 0 <= self.prefix_tokens <= self.prompt_tokens:
            raise ValueError(f"prefix_tokens must be 0 to {self.prompt_tokens}, got {self.prefix_tokens}")


def read_trace(path: Path) -> list[TraceRequest]:
    """Reads a trace, in the order of arrival. Raises ConfigError with file and line."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as e:
        raise ConfigError(f"trace {path}: {e.strerror}") from e
    decode = msgspec.json.Decoder(TraceRequest).decode
    found: list[TraceRequest] = []
    for number, line in enumerate(lines, 1):
        try:
            if line.strip():
                found.append(decode(line))
        except msgspec.DecodeError as e:
            raise ConfigError(f"trace {path}, line {number}: {e}") from e
    if not found:
        raise ConfigError(f"trace {path}: holds no request")
    return sorted(found, key=lambda request: request.arrival_s)


def frames(requests: Iterable[TraceRequest], model: str, block_size: int) -> Iterator[Generate]:
    """Ids of the requests, and the seeds by which a worker recognizes them, are their indexes.

    Block hashes come with them, as from the tokenizer, but each prompt takes only one or two calls of a hash function.
    """
    groups: dict[str, int] = {}
    for serial, request in enumerate(requests):
        shared = 0
        if request.prefix_group:
            shared = request.prompt_tokens if request.prefix_tokens is None else request.prefix_tokens
        group = groups.setdefault(request.prefix_group, len(groups))
        own = struct.pack("I", PROMPT_IDS + serial) * (request.prompt_tokens - shared)
        num_shared = shared // block_size
        yield Generate(
            str(serial),
            0,
            model,
            struct.pack("I", GROUP_IDS + group) * shared + own,
            _hashes(f"group {group}", num_shared)
            + _hashes(f"request {serial}", request.prompt_tokens // block_size - num_shared),
            Sampling(request.max_tokens or request.output_tokens, seed=serial, ignore_eos=request.max_tokens is None),
            TextOptions(),
            [ChoiceState(i) for i in range(request.n)],
            priority=request.priority,
            tenant=request.tenant,
            batch_line=request.batch_line,
        )


def _hashes(beginning: str, count: int) -> bytes:
    """Hashes of `count` blocks. More blocks of the same beginning have the same ones first."""
    return shake_128(beginning.encode()).digest(HASH_BYTES * count) if count else b""
