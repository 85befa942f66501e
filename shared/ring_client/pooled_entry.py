"""An open request of a pooling model: many prompts, and the results that have come."""

import asyncio
from array import array
from collections.abc import Callable, Sequence

import msgspec

from blockyard.shared.errors import RequestError
from blockyard.shared.messages import Pool, VectorBlock
from blockyard.shared.ring_client.open_entry import OpenEntry, TokensMissing
from blockyard.shared.token_ids import ID_BYTES

FLOAT_BYTES = 4
FIELD = "input"  # of prompts in refusals of a scheduler


class Result(msgspec.Struct, frozen=True, gc=False):
    """Of one prompt. The garbage collector does not visit it: a call has many thousands."""

    numbers: bytes  # float32
    width: int  # of a row; 0: there are no rows
    cached_tokens: int


class PooledEntry(OpenEntry):
    """A new attempt asks for the prompts without results. It is open until the last one."""

    def __init__(self, request: Pool, prompts: Sequence[bytes], field_of: Callable[[int], str], now: float) -> None:
        """request: with the parameters; prompts and attempt are filled in. field_of: the name of an input in errors."""
        super().__init__(request.request_id, request.model, now)
        self.field_of = field_of
        self.results: list[Result | None] = [None] * len(prompts)
        self.num_open = len(prompts)
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.lengths = [len(prompt) // ID_BYTES for prompt in prompts]  # tokens
        self._request, self._prompts = request, prompts
        self._seconds = array("I", request.second_starts)

    @property
    def num_held(self) -> tuple[int, int]:
        return 1, sum(self.lengths)

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens of the prompts without a result."""
        return sum(n for n, result in zip(self.lengths, self.results, strict=True) if result is None)

    def on_accepted(self) -> None:
        """No client waits for it: an answer begins with its last result."""

    def on_failed(self, error: RequestError) -> None:
        if not self.done.done():
            self.done.set_exception(self._named(error))

    def finish(self) -> None:
        """The last result has come."""
        self.accept()
        if not self.done.done():
            self.done.set_result(None)

    def take(self, block: VectorBlock, now: float) -> list[int]:
        """Records results. Returns the tokens of their prompts. Raises TokensMissing if some are cut."""
        indexes, lengths = array("I", block.indexes), array("I", block.lengths)
        if len(indexes) != len(lengths) or FLOAT_BYTES * sum(lengths) != len(block.data):
            raise TokensMissing
        if any(index >= len(self.results) for index in indexes):
            raise TokensMissing
        cached = array("I", block.cached_tokens) or array("I", [0]) * len(indexes)
        if len(cached) != len(indexes):
            raise TokensMissing
        end, new = 0, []
        for index, length, found in zip(indexes, lengths, cached, strict=True):
            first, end = end, end + FLOAT_BYTES * length
            if self.results[index] is None:
                self.results[index] = Result(block.data[first:end], block.width, found)
                new.append(self.lengths[index])
        self.num_open -= len(new)
        self.heard_s, self.gaps = now, 0
        return new

    def frame(self) -> Pool:
        """Returns the frame that starts this attempt, with the prompts that have no result."""
        missing = [i for i, result in enumerate(self.results) if result is None]
        seconds = array("I", [self._seconds[i] for i in missing]) if self._seconds else array("I")
        return msgspec.structs.replace(
            self._request,
            attempt=self.attempt,
            token_ids=b"".join([self._prompts[i] for i in missing]),
            lengths=array("I", [self.lengths[i] for i in missing]).tobytes(),
            indexes=array("I", missing).tobytes(),
            second_starts=seconds.tobytes(),
        )

    def _named(self, error: RequestError) -> RequestError:
        """A refusal by the scheduler with the client's name of the input."""
        place = error.field.removeprefix(f"{FIELD}[").removesuffix("]")
        if error.field == place or not place.isdecimal():
            return error
        name = self.field_of(int(place))
        return RequestError(str(error), name, error.status, error.code, error.retry_after_s, error.too_long)
