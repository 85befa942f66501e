"""The interface of the stores of responses, their bounds, and the errors of responses that are not there."""

from dataclasses import dataclass
from typing import Protocol

from blockyard.shared.errors import RequestError
from blockyard.shared.messages import StoredResponse

RECORD_BYTES = 1024  # memory of a response besides its texts
FIELD = "response_id"  # that errors name; the continuation of a response has its own


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """Drops the least recently used responses beyond a bound, and none that is in progress."""

    max_responses: int
    max_bytes: int
    ttl_s: float  # since the last use


class ResponseStore(Protocol):
    """Keeps responses. Each use of one makes it the most recently used. Unknown ids are no error."""

    is_shared: bool  # by all gateways of the host

    def put(self, response: StoredResponse, events: bytes = b"") -> None:
        """Keeps a response in place of an earlier one of its id, and drops responses beyond a bound."""
        ...

    def get(self, response_id: str) -> StoredResponse | None: ...

    def events(self, response_id: str) -> bytes:
        """The packed events of a response that has ended; empty: none are kept."""
        ...

    def delete(self, response_id: str) -> None: ...

    def sweep(self) -> None:
        """Drops expired responses."""
        ...

    def close(self) -> None: ...


def num_bytes(response: StoredResponse, events: bytes) -> int:
    """The memory that a response counts for."""
    return RECORD_BYTES + len(response.data) + len(response.input_items) + len(events)


def not_found(response_id: str) -> RequestError:
    return RequestError(
        f"There is no response {response_id[:200]!r}: it was not stored, was deleted, or is older than "
        "--response-ttl or --max-stored-responses allow.",
        FIELD,
        status=404,
        code="not_found",
    )


def lost(response_id: str) -> RequestError:
    return RequestError(
        f"The response {response_id[:200]!r} was lost with the gateway process that kept it: responses in memory do "
        "not outlive their process; --response-store DIR keeps them.",
        FIELD,
        status=404,
        code="response_lost",
    )
