"""What `generate` and `chat` raise once something ran."""

from collections.abc import Mapping

from blockyard.services.offline.outputs import RequestOutput
from blockyard.shared.errors import BlockyardError


class GenerationError(BlockyardError, RuntimeError):
    """Some prompts failed, the others are done: `outputs` has them, and None where `failures` has the reason."""

    def __init__(self, failures: Mapping[int, Exception], outputs: list[RequestOutput | None]) -> None:
        first = min(failures)
        more = f" ({len(failures) - 1} more of {len(outputs)} prompts failed)" if len(failures) > 1 else ""
        super().__init__(f"prompts[{first}]: {failures[first]}{more}")
        self.failures = dict(failures)
        self.outputs = outputs


class RingLost(BlockyardError, RuntimeError):
    """The ring is closed, or ended by itself."""
