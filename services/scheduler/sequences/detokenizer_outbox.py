"""What this turn has for one detokenizer."""

from blockyard.shared.messages import Cancel, StreamOpen, TokenBatch, TokenRows, TokenStep


class DetokenizerOutbox:
    """A live detokenizer and the batch it gets at the end of the turn."""

    __slots__ = ("_closed", "closes", "incarnation", "num_streams", "opens", "rows", "stamp_s", "steps")

    def __init__(self, incarnation: int) -> None:
        self.incarnation = incarnation
        self.num_streams = 0
        self.opens: list[StreamOpen] = []
        self.rows: list[TokenRows] = []
        self.steps: list[TokenStep] = []
        self.closes: list[Cancel] = []
        self.stamp_s = 0.0
        self._closed: list[TokenBatch] = []

    def stamp(self, stamp_s: float) -> None:
        """Of two results in one turn the older one counts, so that no latency is hidden."""
        if not self.stamp_s:
            self.stamp_s = stamp_s

    def close_batch(self) -> None:
        """What comes from now on comes behind all there is: in a batch steps are read after rows."""
        if self.opens or self.rows or self.steps or self.closes:
            self._closed.append(TokenBatch(self.opens, self.steps, self.closes, self.stamp_s, self.rows))
            self.opens, self.rows, self.steps, self.closes, self.stamp_s = [], [], [], [], 0.0

    def take(self) -> list[TokenBatch]:
        self.close_batch()
        batches, self._closed = self._closed, []
        return batches
