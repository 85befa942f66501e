"""Streams with fewer, larger events: --stream-interval."""

import msgspec

from blockyard.shared.messages import TextDelta
from blockyard.shared.ring_client.journal import Sink


def joined_deltas(deltas: list[TextDelta]) -> TextDelta:
    """Several deltas of a choice, in order, as one."""
    if len(deltas) == 1:
        return deltas[0]
    return msgspec.structs.replace(
        deltas[-1],
        first=deltas[0].first,
        token_ids=[t for d in deltas for t in d.token_ids],
        text="".join(d.text for d in deltas),
        logprobs=[p for d in deltas for p in d.logprobs],
    )


class PacedStream:
    """A journal sink that passes deltas on once they have `interval` tokens. The first and the last are not kept."""

    def __init__(self, sink: Sink, interval: int) -> None:
        self.inner, self._interval = sink, interval
        self._kept: list[TextDelta] = []
        self._num_tokens = interval  # since the last one was passed on

    def push(self, delta: TextDelta, now: float, stamp_s: float) -> None:
        self._num_tokens += len(delta.token_ids)
        self._kept.append(delta)
        if self._num_tokens >= self._interval or delta.finish is not None:
            kept, self._kept, self._num_tokens = self._kept, [], 0
            self.inner.push(joined_deltas(kept), now, stamp_s)
