"""The gateways of a scheduler, and what all of them are told."""

from blockyard.services.scheduler.lifecycle.detokenizer_streams import DetokenizerStreams
from blockyard.services.scheduler.lifecycle.lifecycle import Lifecycle
from blockyard.services.scheduler.outbox import Outbox
from blockyard.shared.messages import PathLost, QueueCapacity, QueueCapacityChanged


class Gateways:
    def __init__(self, lifecycle: Lifecycle, streams: DetokenizerStreams, outbox: Outbox) -> None:
        self._lifecycle, self._streams, self._outbox = lifecycle, streams, outbox
        self.incarnations: set[int] = set()

    def add(self, gateway: int) -> None:
        self.incarnations.add(gateway)

    def remove(self, member: int) -> None:
        """Drops the requests of a lost member, if it is a gateway."""
        if member in self.incarnations:
            self.incarnations.discard(member)
            self._lifecycle.drop_gateway(member)
            self._outbox.answer(member, PathLost(member))  # it may be alive behind a broken link

    def tell_capacity(self, capacity: QueueCapacity) -> None:
        for gateway in self.incarnations:
            self._outbox.answer(gateway, QueueCapacityChanged(capacity))

    def tell_lost_detokenizers(self) -> None:
        """Gateways know the affected requests best: some have ended here already."""
        for detokenizer in self._streams.take_lost():
            for gateway in self.incarnations:
                self._outbox.answer(gateway, PathLost(detokenizer))
