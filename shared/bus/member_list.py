"""What one member knows of the others: pure bookkeeping over the registry's pushes and its own links."""

from dataclasses import dataclass

import msgspec

from blockyard.shared.messages import Member, Members

DISTRUST_S = 1.0  # a list that was pushed before the registry heard of it is older than this


@dataclass(frozen=True, slots=True)
class Joined:
    """A member is on the list and may be sent to."""

    member: Member


@dataclass(frozen=True, slots=True)
class Changed:
    """A member's entry differs (ready, card, phase, stats)."""

    member: Member


@dataclass(frozen=True, slots=True)
class Gone:
    """A member left, died, or its link broke; what was sent to it and not answered is lost."""

    member: Member


Event = Joined | Changed | Gone


class MemberList:
    """The last list, less those whose link broke here and whom the registry has not dropped yet."""

    def __init__(self, own: int) -> None:
        self._own = own
        self._distrusted: dict[int, float] = {}  # incarnation -> until when the list is not believed
        self.members: dict[int, Member] = {}

    def push(self, news: Members, now: float) -> list[Event]:
        """Takes the registry's list. An unsettled one only adds: a new registry has not heard everybody yet."""
        listed = {m.incarnation: m for m in news.members if m.incarnation != self._own}
        for incarnation in list(self._distrusted):
            if self._distrusted[incarnation] < now or (news.settled and incarnation not in listed):
                del self._distrusted[incarnation]
        events: list[Event] = []
        if news.settled:
            for incarnation in self.members.keys() - listed.keys():
                events.append(Gone(self.members.pop(incarnation)))
        for incarnation, member in listed.items():
            if incarnation in self._distrusted:
                continue
            before = self.members.get(incarnation)
            self.members[incarnation] = member
            if before is None:
                events.append(Joined(member))
            elif before != member:
                events.append(Changed(member))
        return events

    def link_broke(self, incarnation: int, now: float) -> list[Event]:
        """The link to a member closed or is full: it is gone until `link_returned` or the registry says so."""
        member = self.members.pop(incarnation, None)
        if member is None:
            return []
        self._distrusted[incarnation] = now + DISTRUST_S
        return [Gone(msgspec.structs.replace(member, ready=False))]

    def link_returned(self, member: Member) -> list[Event]:
        """The same incarnation answered on a new link. What the broken one lost is for the caller to send again."""
        self._distrusted.pop(member.incarnation, None)
        if member.incarnation in self.members:
            return []
        self.members[member.incarnation] = member
        return [Joined(member)]
