"""Warns of workers of different roles that cannot exchange KV blocks, once for each pair of layouts."""

import logging
from collections.abc import Iterable

from blockyard.services.scheduler.admission.model_limits import exchange
from blockyard.shared.messages import Geometry, KVRole

log = logging.getLogger(__name__)


class LayoutCheck:
    """Remembers which pairs of layouts were compared."""

    def __init__(self) -> None:
        self._compared: set[frozenset[tuple[KVRole, str]]] = set()

    def on_attached(self, worker: int, geometry: Geometry, attached: Iterable[tuple[int, Geometry]]) -> None:
        """Compares a new worker with the attached ones of other roles. A worker that is lost is in no warning."""
        role = geometry.kv_role
        for other, theirs in attached:
            pair = frozenset({(role, geometry.kv_layout), (theirs.kv_role, theirs.kv_layout)})
            if role is theirs.kv_role or pair in self._compared:
                continue
            self._compared.add(pair)
            if not exchange(geometry, theirs):
                log.warning(
                    "workers %x (%s) and %x (%s) exchange no KV blocks: %s",
                    worker,
                    role,
                    other,
                    theirs.kv_role,
                    _reason({worker: geometry, other: theirs}),
                )


def _reason(two: dict[int, Geometry]) -> str:
    for worker, geometry in two.items():
        if not geometry.kv_layout:
            return f"{worker:x} has no KV transfers; start it with --role"
    mine, theirs = two.values()
    parts = zip(mine.kv_layout.split("; "), theirs.kv_layout.split("; "), strict=False)
    differing = [f"{part} and {other}" for part, other in parts if part != other]
    return "; ".join(differing) or f"block size {mine.block_size} and {theirs.block_size}"
