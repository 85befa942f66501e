"""The served models, their schedulers, and the capacity of their queues: known before a prompt is tokenized."""

from collections.abc import Iterable

import msgspec

from blockyard.shared.errors import RequestError
from blockyard.shared.messages import AdapterCard, Member, ModelCard, QueueCapacity, Role
from blockyard.shared.ring_client.lost_adapters import LostAdapters

FULL_FOR_S = 5.0  # a queue counts as full for at most this long, in case the frame of new capacity is lost
# A model still takes requests for this long after its last scheduler was lost. One that stands still is lost after 4 s,
# killed after 10 s (--hung-timeout), and back some seconds later.
AWAY_S = 20.0
MODEL_NOT_FOUND = "model_not_found"  # OpenAI's error code
UNHEARD = QueueCapacity(16, 2**16)


class Served(msgspec.Struct, frozen=True):
    """The models that requests may name."""

    cards: list[ModelCard]
    expected: list[str]  # configured names, and lost adapters: 503 instead of 404 until their scheduler joins

    def card(self, model: str | None) -> ModelCard:
        """The card for a request's `model`; without one, the only model there is. Raises RequestError."""
        cards = self.cards
        if not model and len(cards) == 1:
            return cards[0]
        if not model:
            raise RequestError("which model? `model` is missing", "model") if cards else not_ready("any model")
        for card in cards:
            if model in card.names:
                return card
            for adapter in card.adapters:
                if model == adapter.name:
                    return card.with_adapter(adapter)
        if model in self.expected or not (self.expected or cards):
            raise not_ready(f"the model `{model}`")
        raise RequestError(f"The model `{model[:200]}` does not exist.", "model", 404, code=MODEL_NOT_FOUND)


class Schedulers:
    """Fed with members and QueueCapacity records; it has no sockets."""

    def __init__(self, served_model_names: list[str]) -> None:
        self._expected = set(served_model_names)
        self._schedulers: dict[int, Member] = {}
        self._away: dict[str, tuple[ModelCard, float]] = {}  # by first name: models that may be restarting
        # by first name, too, for however long that takes: workers may have to load a large model first
        self._lost: dict[str, ModelCard] = {}
        self._capacities: dict[int, tuple[QueueCapacity, float]] = {}
        self.lost_adapters = LostAdapters()

    def changed(self, member: Member) -> None:
        if member.role != Role.SCHEDULER:
            return
        if member.ready and member.card is not None:
            self._expected.update(member.card.names)
            self._away.pop(member.card.names[0], None)
            before = self._lost.pop(member.card.names[0], None)
            if before is not None and member.incarnation not in self._schedulers:
                self.lost_adapters.begin(member.incarnation, before, member.card)
            card = self.lost_adapters.with_missing(member.incarnation, member.card)
            self._schedulers[member.incarnation] = msgspec.structs.replace(member, card=card)
        else:
            self._schedulers.pop(member.incarnation, None)

    def on_adapters(self, scheduler: int, adapters: list[AdapterCard], unloaded: list[str]) -> None:
        """A scheduler has answered a command with the adapters that it serves, and names that it has unloaded: its card
        with them comes later."""
        member = self._schedulers.get(scheduler)
        if member is not None and member.card is not None:
            card = msgspec.structs.replace(member.card, adapters=adapters, unloaded=unloaded)
            card = self.lost_adapters.with_missing(scheduler, card)
            self._schedulers[scheduler] = msgspec.structs.replace(member, card=card)

    def gone(self, member: Member, now: float) -> None:
        lost = self._schedulers.pop(member.incarnation, None)
        self.lost_adapters.gone(member.incarnation)
        self._capacities.pop(member.incarnation, None)
        if lost is not None and lost.card is not None and not self.of(lost.card.names[0]):
            self._away[lost.card.names[0]] = lost.card, now + AWAY_S
            self._lost[lost.card.names[0]] = lost.card

    def tick(self, now: float) -> None:
        """Removes models that stayed without a scheduler for AWAY_S."""
        self.lost_adapters.tick(now)
        self._away = {name: away for name, away in self._away.items() if now < away[1]}

    def cards(self) -> list[ModelCard]:
        """Returns one card per model, including models that may be restarting."""
        cards = {name: card for name, (card, _) in self._away.items()}
        return list((cards | {m.card.names[0]: m.card for m in self._schedulers.values() if m.card}).values())

    def served(self) -> Served:
        lost = {adapter.name for card in self._lost.values() for adapter in card.adapters}
        return Served(self.cards(), sorted(self._expected | lost))

    def card(self, model: str | None) -> ModelCard:
        """The card for a request's `model`; without one, the only model there is. Raises RequestError."""
        return self.served().card(model)

    def of(self, model: str, *adapters: str) -> list[int]:
        """The schedulers of a model that have the adapters, if some are named, already."""
        found = [i for i, m in self._schedulers.items() if m.card is not None and model in m.card.names]
        return [i for i in found if not any(self.lost_adapters.waits(i, one) for one in adapters)]

    def heard(self, scheduler: int, capacity: QueueCapacity, now: float) -> None:
        self._capacities[scheduler] = (capacity, now)

    def check_capacity(self, model: str, now: float, tenant: str = "", user: str = "") -> None:
        """Raises a 429 if every scheduler of the model is full for this user."""
        capacities = [self._capacities.get(s) for s in self.of(model)]
        full = [k[0] for k in capacities if k is not None and _is_full(k, now) and _concerns(k[0], tenant, user)]
        if full and len(full) == len(capacities):
            raise too_busy(min(r.retry_after_s for r in full), asleep=full[0].asleep)

    def takes(self, model: str, choices: int, tokens: int, now: float, alone: bool = False) -> bool:
        """Returns whether a scheduler has capacity for so many choices and tokens, by its last record.

        A scheduler without a record counts as UNHEARD. `alone`: no other request waits for an answer. Such a request
        may exceed the capacity, and is sent if the last record is older than its retry_after_s.
        """
        for scheduler in self.of(model):
            capacity, heard_s = self._capacities.get(scheduler, (UNHEARD, now))
            if choices <= capacity.choices and tokens <= capacity.tokens:
                return True
            if alone and ((capacity.choices > 0 and capacity.tokens > 0) or now - heard_s >= capacity.retry_after_s):
                return True
        return False

    def most_free(self, schedulers: Iterable[int], now: float) -> int | None:
        """Returns the scheduler with the most capacity, full ones last; None if `schedulers` is empty."""
        best: tuple[bool, int] | None = None
        chosen = None
        for scheduler in schedulers:
            known = self._capacities.get(scheduler)
            rank = (known is None or not _is_full(known, now), known[0].tokens if known else 2**63)
            if best is None or rank > best:
                best, chosen = rank, scheduler
        return chosen


def _is_full(known: tuple[QueueCapacity, float], now: float) -> bool:
    capacity, heard_s = known
    return (capacity.choices <= 0 or capacity.tokens <= 0) and now - heard_s < FULL_FOR_S


def _concerns(capacity: QueueCapacity, tenant: str, user: str) -> bool:
    """True if the record applies to this user. A queue full for its largest user may still accept others."""
    return capacity.tenant is None or (capacity.tenant, capacity.user) == (tenant, user)


def too_busy(retry_after_s: float, asleep: bool = False) -> RequestError:
    text, status = "The server has as many requests waiting as it takes.", 503 if asleep else 429
    return RequestError(text, status=status, retry_after_s=retry_after_s)


def not_ready(what: str) -> RequestError:
    return RequestError(f"No scheduler is ready to serve {what} yet.", "model", 503, retry_after_s=1.0)
