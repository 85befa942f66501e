"""KV blocks that move between simulated workers: both ends of each transfer, and the links that it uses."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from blockyard.shared.config.services.simulation import CostModel
from blockyard.shared.messages import KVAbort, KVLanded, KVReceive, KVSend, KVSendEnded


@dataclass(slots=True, eq=False)
class SimTransfer:
    source: int  # incarnation, as of `target`
    target: int
    landed: list[int] = field(default_factory=list)  # blocks of the target
    is_sending: bool = False  # the source has begun
    last_lands_s: float = 0.0


@dataclass(slots=True)
class SimLink:
    """One direction of a worker's link. Copies use it one after the other."""

    free_at: float = 0.0


class SimTransfers:
    """Answers KVReceive, sends and KVAbort as two workers do. The caller delays each call by its frame's way."""

    def __init__(
        self,
        cost: CostModel,
        block_size: int,
        call_at: Callable[[float, Callable[[float], None]], None],
        tell: Callable[[float, int, KVLanded | KVSendEnded], None],
    ) -> None:
        """`call_at(when, function)` calls the function with the time; `tell(when, worker, frame)` sends a worker's
        frame to the scheduler."""
        self.num_bytes = 0
        self._cost, self._block_bytes = cost, block_size * cost.token_bytes
        self._call_at, self._tell = call_at, tell
        self._open: dict[int, SimTransfer] = {}
        self._out: defaultdict[int, SimLink] = defaultdict(SimLink)  # by worker
        self._in: defaultdict[int, SimLink] = defaultdict(SimLink)

    def receive(self, target: int, frame: KVReceive) -> None:
        self._open[frame.transfer] = SimTransfer(frame.source, target)

    def send(self, sends: Iterable[KVSend], began_at: float, ended_at: float) -> None:
        """The source computes a step with these sends between the two times."""
        cost = self._cost
        leaves_at = began_at + (ended_at - began_at) / cost.num_layers if cost.stream_layers else ended_at
        for send in sends:
            self._call_at(leaves_at, partial(self._write, send, ended_at))

    def _write(self, send: KVSend, computed_at: float, now: float) -> None:
        transfer = self._open.get(send.transfer)
        if transfer is None:
            return  # it was given up, or a worker is lost
        transfer.is_sending = True
        out, into = self._out[transfer.source], self._in[transfer.target]
        num_bytes = len(send.blocks) * self._block_bytes
        copy_s = num_bytes / self._cost.link_bytes_s
        out.free_at = into.free_at = written_at = max(now, out.free_at, into.free_at) + copy_s
        if self._cost.stream_layers:  # the last layer leaves when the step ends
            written_at = max(written_at, computed_at + copy_s / self._cost.num_layers)
        lands_at = transfer.last_lands_s = max(written_at + self._cost.link_latency_s, transfer.last_lands_s)
        self.num_bytes += num_bytes
        self._call_at(lands_at, partial(self._land, send))

    def _land(self, send: KVSend, now: float) -> None:
        transfer = self._open.get(send.transfer)
        if transfer is None:
            return
        transfer.landed += send.target_blocks
        if send.is_last:
            self._end(send.transfer, transfer, now, is_complete=True)

    def abort(self, worker: int, frame: KVAbort, now: float) -> None:
        transfer = self._open.get(frame.transfer)
        if transfer is not None:
            self._end(frame.transfer, transfer, now)
        if transfer is None or (worker == transfer.source and not transfer.is_sending):
            self._answer_unknown(worker, frame, now)

    def on_lost(self, worker: int, now: float) -> None:
        """A worker is dead: the others see that its links are closed."""
        for number, transfer in list(self._open.items()):
            if worker in (transfer.source, transfer.target):
                self._end(number, transfer, now)
        self._out.pop(worker, None)
        self._in.pop(worker, None)

    def _end(self, number: int, transfer: SimTransfer, now: float, is_complete: bool = False) -> None:
        del self._open[number]
        self._tell(now, transfer.target, KVLanded(number, transfer.landed, is_ended=True))
        if transfer.is_sending:
            self._tell(now, transfer.source, KVSendEnded(number, is_complete))

    def _answer_unknown(self, worker: int, frame: KVAbort, now: float) -> None:
        if frame.is_source:
            self._tell(now, worker, KVSendEnded(frame.transfer, False))
        else:
            self._tell(now, worker, KVLanded(frame.transfer, [], is_ended=True))
