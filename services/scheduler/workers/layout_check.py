"""Warns of workers of different roles that cannot exchange KV blocks, once for each pair of layouts."""

import logging

from blockyard.services.scheduler.admission.admission import exchange
from blockyard.shared.messages import Geometry, KVRole

log = logging.getLogger(__name__)


class LayoutCheck:
    """Remembers one worker of each role and layout, so that a new worker is compared with few."""

    def __init__(self) -> None:
        self._seen: dict[tuple[KVRole, str], tuple[int, Geometry]] = {}

    def on_attached(self, worker: int, geometry: Geometry) -> None:
        key = geometry.kv_role, geometry.kv_layout
        if key in self._seen:
            return
        for (role, _), (other, theirs) in self._seen.items():
            if role is not key[0] and not exchange(geometry, theirs):
                log.warning(
                    "workers %x (%s) and %x (%s) exchange no KV blocks: %s",
                    worker,
                    key[0],
                    other,
                    role,
                    _reason({worker: geometry, other: theirs}),
                )
        self._seen[key] = worker, geometry


def _reason(two: dict[int, Geometry]) -> str:
    for worker, geometry in two.items():
        if not geometry.kv_layout:
            return f"{worker:x} has no KV transfers; start it with --role"
    mine, theirs = two.values()
    parts = zip(mine.kv_layout.split("; "), theirs.kv_layout.split("; "), strict=False)
    differing = [f"{part} and {other}" for part, other in parts if part != other]
    return "; ".join(differing) or f"block size {mine.block_size} and {theirs.block_size}"
