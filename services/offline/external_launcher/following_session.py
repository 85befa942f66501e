"""A `Session` without a ring: process 0 of the script has it."""

from blockyard.services.launcher.supervision.start_up import QuietDisplay
from blockyard.services.offline.external_launcher.processes import OtherProcess
from blockyard.services.offline.session import Session
from blockyard.shared.config.parsed_flags import Values
from blockyard.shared.errors import RequestError
from blockyard.shared.messages import ModelCard


class FollowingSession(Session):
    """Knows the model's settings and files. What needs the ring is a RequestError."""

    def __init__(self, values: Values, processes: OtherProcess) -> None:
        """Raises ConfigError as process 0 does."""
        super().__init__(values, lambda _: QuietDisplay())
        self._processes = processes
        self._card: ModelCard | None = None

    @property
    def card(self) -> ModelCard:
        assert self._card is not None, "the session has started"
        return self._card

    def start(self) -> None:
        """Returns when process 0's ring can serve. Raises RingLost if it fails."""
        self._card = self._processes.wait_ready()

    def close(self) -> None:
        self._processes.close()
        self._cleanup.close()

    def _check_alive(self) -> None:
        raise RequestError(
            "only process 0 of the script has the ring; all processes may call generate, chat, beam_search"
        )
