"""Which rank of a sending worker writes what to which rank of a receiving one. Pure functions, without torch and zmq.

Two ranks with a route between them are one pair of the protocol: each pair has a link, and transfers with numbers of
their own. One rank of each worker is the case with one route.
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from blockyard.services.kv_transfer.layout import BlockLayout, LayoutPart

_RANK_STEP = 0x9E3779B97F4A7C15  # between incarnations of a worker's ranks
_PAIR_BIT = 52  # of numbers: those of one scheduler differ only in lower bits
MAX_PAIRS = 1 << 12


class RankPlace(msgspec.Struct, frozen=True, array_like=True):
    """How other workers reach the KV memory of one rank."""

    endpoint: str
    generation: int  # of its arena
    part: LayoutPart


class RankRoute(NamedTuple):
    sender: int  # ranks
    receiver: int
    part: LayoutPart | None  # that the sender writes to this receiver; None: all of the model
    pair: int  # number of these two ranks among all pairs


def encode_places(places: Sequence[RankPlace]) -> bytes:
    """The `kv_endpoint` of a worker: its ranks in order."""
    return msgspec.msgpack.encode(places)


def decode_places(data: bytes) -> list[RankPlace]:
    """Raises ValueError for bytes that are not from `encode_places`."""
    try:
        places = msgspec.msgpack.decode(data, type=list[RankPlace])
    except msgspec.DecodeError as e:
        raise ValueError(f"not a worker's KV endpoint: {e}") from e
    if not places:
        raise ValueError("the other worker has no ranks")
    return places


def find_routes(layout: BlockLayout, senders: Sequence[LayoutPart], receivers: Sequence[LayoutPart]) -> list[RankRoute]:
    """Returns routes that write each head of each layer once to every receiver that has it.

    Of several senders with the same heads, receivers take different ones in turn. Raises ValueError if a receiver has
    something that no sender has.
    """
    if len(senders) * len(receivers) > MAX_PAIRS:
        raise ValueError(f"{len(senders)} and {len(receivers)} ranks are too many for KV transfers")
    found: list[RankRoute] = []
    for receiver, part in enumerate(receivers):
        chosen = _choose(layout.of(part), receiver, senders)
        for sender, heads in sorted(chosen.items()):
            layers = _common(senders[sender].layers, part.layers)
            ranges = tuple(heads.get(run, (0, 0)) for run in range(len(layout.runs)))
            pair = sender * len(receivers) + receiver
            some = LayoutPart(layers.start, len(layers), ranges)
            found.append(RankRoute(sender, receiver, None if some == layout.whole else some, pair))
    return found


def _choose(wanted: BlockLayout, receiver: int, senders: Sequence[LayoutPart]) -> dict[int, dict[int, tuple[int, int]]]:
    """Returns the heads that each sender writes, by run."""
    chosen: dict[int, dict[int, tuple[int, int]]] = {}
    firsts = [sum(run.num_layers for run in wanted.runs[:i]) for i in range(len(wanted.runs))]
    for section in wanted.sections:
        run = max(i for i, first in enumerate(firsts) if first <= section.layers.start)
        for head in section.heads:
            stages: dict[int, list[int]] = {}  # senders with this head, by their first layer
            for sender, part in enumerate(senders):
                if head in range(*part.heads[run]) and _common(part.layers, section.layers):
                    stages.setdefault(part.first_layer, []).append(sender)
            covered = sum(len(_common(senders[same[0]].layers, section.layers)) for same in stages.values())
            if covered != len(section.layers):
                raise ValueError(f"K/V head {head} of {section.layers} is on no rank of the sender")
            for same in stages.values():
                heads = chosen.setdefault(same[receiver % len(same)], {})
                heads[run] = (heads.get(run, (head, head))[0], head + 1)
    return chosen


def _common(one: range, other: range) -> range:
    start = max(one.start, other.start)
    return range(start, max(start, min(one.stop, other.stop)))


def rank_incarnation(worker: int, rank: int) -> int:
    """Returns what stands for a rank in frames between ranks. worker: the incarnation of its worker."""
    return (worker + rank * _RANK_STEP) & (1 << 64) - 1


def pair_number(transfer: int, route: RankRoute) -> int:
    """Returns the number of a transfer's part between two ranks."""
    return transfer ^ (route.pair << _PAIR_BIT)


def rank_ticket(ticket: bytes, sender: int) -> bytes:
    """Returns the ticket for a link of one rank of the sender."""
    return ticket + bytes([sender]) if ticket and sender else ticket
