"""Bounds on the generation requests of a gateway, waiting or running: --max-num-queued-reqs, --max-num-queued-tokens.

The scheduler's bounds are for what waits there. These bound what a gateway has open at all, and prompts without output.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from blockyard.services.api_gateway.responses.http_generation import HttpGeneration
from blockyard.shared.ring_client.schedulers import too_busy

RETRY_AFTER_S = 1.0


class InFlightLimits:
    """None: no bound."""

    def __init__(self, max_requests: int | None, max_tokens: int | None) -> None:
        self._max_requests, self._max_tokens = max_requests, max_tokens
        self._num_requests = 0

    @contextmanager
    def counted(self, num_choices: int) -> Iterator[None]:
        """Counts a request until the block is left. One that is alone may have any number of choices. Raises a 429."""
        most, already = self._max_requests, self._num_requests
        if most is not None and already and already + num_choices > most:
            raise too_busy(RETRY_AFTER_S)
        self._num_requests += num_choices
        try:
            yield
        finally:
            self._num_requests -= num_choices

    def check_tokens(self, generations: Iterable[HttpGeneration]) -> None:
        """Raises a 429 if the prompts without output have as many tokens as they may."""
        if self._max_tokens is None:
            return
        entries = (entry for generation in generations for entry in generation.entries)
        if sum(e.num_prompt_tokens for e in entries if not e.has_output and e.num_open) >= self._max_tokens:
            raise too_busy(RETRY_AFTER_S)
