"""What this turn has for one detokenizer."""

from blockyard.shared.messages import Cancel, StreamOpen, TokenBatch, TokenStep


class TextSink:
    """A live detokenizer and the batch it gets at the end of the turn."""

    __slots__ = ("closes", "incarnation", "num_streams", "opens", "stamp_s", "steps")

    def __init__(self, incarnation: int) -> None:
        self.incarnation = incarnation
        self.num_streams = 0
        self.opens: list[StreamOpen] = []
        self.steps: list[TokenStep] = []
        self.closes: list[Cancel] = []
        self.stamp_s = 0.0

    def stamp(self, stamp_s: float) -> None:
        """Of two results in one turn the older one counts, so that no latency is hidden."""
        if not self.stamp_s:
            self.stamp_s = stamp_s

    def take(self) -> TokenBatch | None:
        if not (self.opens or self.steps or self.closes):
            return None
        batch = TokenBatch(self.opens, self.steps, self.closes, self.stamp_s)
        self.opens, self.steps, self.closes, self.stamp_s = [], [], [], 0.0
        return batch
