"""Replaces `Links` in tests: records sent frames; the test sets the members."""

from typing import Any

import msgspec

from blockyard.shared.messages import Frame, Member, Role, Stats


class FakeLinks:
    """`sent` and `answered` hold (incarnation, frame) in order. `full` lists incarnations with full links."""

    def __init__(self, me: Member, *members: Member) -> None:
        self.me = me
        self.members: dict[int, Member] = {m.incarnation: m for m in members}
        self.sent: list[tuple[int, Frame]] = []
        self.answered: list[tuple[int, Frame]] = []
        self.full: set[int] = set()
        self.watched: list[Any] = []

    def of(self, role: Role, model: str = "") -> list[Member]:
        return [
            m for m in self.members.values() if m.role == role and m.ready and (not model or m.model in ("", model))
        ]

    def send(self, to: int, frame: Frame) -> bool:
        if to not in self.members or to in self.full:
            return False
        self.sent.append((to, frame))
        return True

    def answer(self, to: int, frame: Frame) -> bool:
        if to in self.full:
            return False
        self.answered.append((to, frame))
        return True

    def watch(self, *sources: Any) -> None:
        self.watched.extend(sources)

    def unwatch(self, *sources: Any) -> None:
        for source in sources:
            self.watched.remove(source)

    def update(self, **fields: Any) -> None:
        self.me = msgspec.structs.replace(self.me, **fields)

    def count(self, stats: Stats) -> None:
        self.update(stats=stats)
