"""One member's view of the others, from the registry's lists and its own links. No sockets."""

from dataclasses import dataclass

import msgspec

from blockyard.shared.messages import Member, Members

DISTRUST_S = 1.0  # lists pushed before the registry learned of a broken link arrive within this time
REFUSED_S = 10.0  # until a member of another protocol version is tried again


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
    """A member left, died, or its link broke. Unanswered frames to it are lost."""

    member: Member


Event = Joined | Changed | Gone


class MemberList:
    """The last list without members whose link broke here and which the registry has not removed yet."""

    def __init__(self, own: int) -> None:
        self._own = own
        self._distrusted: dict[int, float] = {}  # incarnation -> time until which lists that name it are ignored
        self.members: dict[int, Member] = {}

    def push(self, news: Members, now: float) -> list[Event]:
        """Applies the registry's list. An unsettled list only adds: a new registry has not heard all members yet."""
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

    def link_broke(self, incarnation: int, now: float, distrust_s: float = DISTRUST_S) -> list[Event]:
        """The link to a member closed or is full: the member is Gone until `link_returned` or a later list.

        `distrust_s`: lists of the next seconds do not make it Joined.
        """
        member = self.members.pop(incarnation, None)
        if member is None:
            return []
        self._distrusted[incarnation] = now + distrust_s
        return [Gone(msgspec.structs.replace(member, ready=False))]

    def link_returned(self, member: Member) -> list[Event]:
        """The same incarnation answered on a new link. The caller sends again what the broken link lost."""
        self._distrusted.pop(member.incarnation, None)
        if member.incarnation in self.members:
            return []
        self.members[member.incarnation] = member
        return [Joined(member)]
