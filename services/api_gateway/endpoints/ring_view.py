"""The ring as the playground, /health and /ready see it: the membership list, summed where that says something."""

import msgspec

from blockyard.shared.messages import Member, Role
from blockyard.shared.ring_client.ring_links import RingLinks

NEEDED = (Role.TOKENIZER_POOL, Role.SCHEDULER, Role.GPU_WORKER, Role.DETOKENIZER)


class StatsView(msgspec.Struct, frozen=True):
    running: int
    waiting: int
    requests_total: int
    prompt_tokens_total: int
    output_tokens_total: int
    preemptions_total: int
    blocks_used: int
    blocks_total: int
    steps_total: int
    rss_bytes: int
    malformed_total: int


class MemberView(msgspec.Struct, frozen=True):
    name: str
    role: str
    incarnation: str  # 64 bits in hex: too large for a JavaScript number
    model: str
    ready: bool
    phase: str
    progress: float
    notes: list[str]
    group: int
    rank: int
    stats: StatsView


class Totals(msgspec.Struct, frozen=True):
    """Requests as the gateways count them, tokens and blocks as the schedulers do."""

    requests_total: int
    prompt_tokens_total: int
    output_tokens_total: int
    running: int
    waiting: int
    preemptions_total: int
    blocks_used: int
    blocks_total: int


class RingView(msgspec.Struct, frozen=True):
    members: list[MemberView]
    totals: Totals


def view(links: RingLinks) -> bytes:
    members = [links.me, *links.members.values()]
    members.sort(key=lambda m: (list(Role).index(m.role), m.name))
    return msgspec.json.encode(RingView([_member(m) for m in members], _totals(members)))


def missing(links: RingLinks) -> list[str]:
    """The roles without a ready member, without which nothing is served."""
    return [role.value for role in NEEDED if not links.of(role)]


def progresses(links: RingLinks, stalled: frozenset[int]) -> bool:
    """True if some worker group is there, and a scheduler whose steps do not stand still."""
    moving = [m for m in links.of(Role.SCHEDULER) if m.incarnation not in stalled]
    return bool(moving and links.of(Role.GPU_WORKER))


def _member(m: Member) -> MemberView:
    stats = StatsView(**{field: getattr(m.stats, field) for field in StatsView.__struct_fields__})
    return MemberView(
        m.name,
        m.role.value,
        f"{m.incarnation:016x}",
        m.model,
        m.ready,
        m.phase,
        m.progress,
        m.notes,
        m.group,
        m.rank,
        stats,
    )


def _totals(members: list[Member]) -> Totals:
    def total(role: Role, field: str) -> int:
        return sum(getattr(m.stats, field) for m in members if m.role == role)

    return Totals(
        requests_total=total(Role.API_GATEWAY, "requests_total"),
        prompt_tokens_total=total(Role.SCHEDULER, "prompt_tokens_total"),
        output_tokens_total=total(Role.SCHEDULER, "output_tokens_total"),
        running=total(Role.SCHEDULER, "running"),
        waiting=total(Role.SCHEDULER, "waiting"),
        preemptions_total=total(Role.SCHEDULER, "preemptions_total"),
        blocks_used=total(Role.SCHEDULER, "blocks_used"),
        blocks_total=total(Role.SCHEDULER, "blocks_total"),
    )
