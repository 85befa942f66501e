"""The adapters that requests may name, and replaced or unloaded ones that requests still use."""

from dataclasses import dataclass, field

from blockyard.shared.messages import AdapterCard, AdapterLoaded, AddedToken

MOST_UNLOADED = 1024  # names that are known to be unloaded; a gateway has them with the model's card


@dataclass(slots=True, eq=False)
class Adapter:
    """One adapter's bytes under one name. Another load of the name is another adapter."""

    number: int
    name: str
    path: str
    parent: str
    created: int  # seconds since the epoch
    is_prompt: bool = False  # a prompt adapter; False: a LoRA adapter
    was_asked_for: bool = False  # by an operator or a request
    num_virtual_tokens: int = 0  # of a prompt adapter, once a worker has read it
    max_len: int = 0  # of its longest sequence, if it is for longer contexts than the model
    num_added_tokens: int = 0  # ids behind the model's vocabulary
    has_tokenizer: bool = False  # its requests have the tokenizer in its folder ...
    added_tokens: list[AddedToken] = field(default_factory=list)  # ... with these tokens beside the model's
    digest: bytes = b""  # empty: no worker has read it yet
    error: str = ""  # why a worker could not read it, the last time
    status: int = 400  # HTTP status of that error
    is_served: bool = False  # requests may name it
    is_retired: bool = False  # it goes once no request uses it
    requests: set[str] = field(default_factory=set)  # ids of requests that use it

    def card(self) -> AdapterCard:
        columns = (self.name, self.path, self.parent, self.digest, self.created, self.num_virtual_tokens, self.max_len)
        return AdapterCard(*columns, self.num_added_tokens, self.has_tokenizer, self.was_asked_for)

    def learn(self, loaded: AdapterLoaded) -> None:
        """Takes what a worker has read."""
        self.digest, self.num_virtual_tokens, self.max_len = loaded.digest, loaded.num_virtual_tokens, loaded.max_len
        self.num_added_tokens, self.has_tokenizer = loaded.num_added_tokens, loaded.has_tokenizer
        self.added_tokens = loaded.added_tokens


class AdapterRegistry:
    """All adapters of a scheduler, by number and by name."""

    def __init__(self) -> None:
        self.all: dict[int, Adapter] = {}
        self._served: dict[str, Adapter] = {}
        self._num_made = 0
        self.has_unused = False  # a retired adapter may have no request any more
        self._unloaded: dict[str, None] = {}  # names that operators have unloaded: requests do not load them again
        self.cards: list[AdapterCard] = []  # of served adapters; a new list after each change
        self.unloaded: list[str] = []  # those of no retired adapter: the command is done; a new list after each change

    def add(
        self, name: str, path: str, parent: str, created: int, *, is_prompt: bool = False, was_asked_for: bool = False
    ) -> Adapter:
        """A new adapter, which is not served before it is read."""
        self._num_made += 1
        adapter = Adapter(self._num_made, name, path, parent, created, is_prompt, was_asked_for)
        self.all[adapter.number] = adapter
        return adapter

    def served(self, *, are_prompts: bool = False) -> list[int]:
        """Numbers of the adapters of a kind that requests may name."""
        return [one.number for one in self._served.values() if one.is_prompt == are_prompts]

    @property
    def num_prompts(self) -> int:
        """Prompt adapters that workers hold or read."""
        return sum(one.is_prompt for one in self.all.values())

    def named(self, name: str) -> Adapter | None:
        return self._served.get(name)

    def find(self, name: str, digest: bytes) -> Adapter | None:
        """The adapter that a request names, with the bytes that its prompt's hashes are of.

        Also one that was replaced or unloaded, while others use it: a request that continues keeps its bytes.
        """
        served = self._served.get(name)
        if served is not None and served.digest == digest:
            return served
        alike = (one for one in self.all.values() if one.name == name and one.digest == digest and one.requests)
        return next(alike, served)

    def take_unused(self) -> list[Adapter]:
        """Removes the retired adapters that no request uses."""
        self.has_unused = False
        unused = [one for one in self.all.values() if one.is_retired and not one.requests]
        for one in unused:
            del self.all[one.number]
        self._update()
        return unused

    def use(self, number: int, request_id: str) -> None:
        """A request is live, which keeps the adapter."""
        self.all[number].requests.add(request_id)

    def is_used(self, number: int) -> bool:
        adapter = self.all.get(number)
        return adapter is not None and bool(adapter.requests)

    def on_request_ended(self, request_id: str, number: int) -> None:
        adapter = self.all.get(number)
        if adapter is not None:
            adapter.requests.discard(request_id)
            self.has_unused = self.has_unused or adapter.is_retired

    def serve(self, adapter: Adapter) -> Adapter | None:
        """Requests may name it from here on. Returns the adapter that had its name, which is retired."""
        before = self._served.get(adapter.name)
        if before is not None:
            self.retire(before)
        adapter.is_served = True
        self._served[adapter.name] = adapter
        self._unloaded.pop(adapter.name, None)
        self._update()
        return before

    def retire(self, adapter: Adapter) -> None:
        """No new request may name it."""
        adapter.is_served, adapter.is_retired, self.has_unused = False, True, True
        if self._served.get(adapter.name) is adapter:
            del self._served[adapter.name]
        self._update()

    def unload(self, name: str) -> None:
        """No request may name the adapter, if there is one, or load one of that name."""
        self._unloaded.pop(name, None)
        self._unloaded[name] = None
        if len(self._unloaded) > MOST_UNLOADED:  # the oldest is forgotten
            del self._unloaded[next(iter(self._unloaded))]
        if (served := self._served.get(name)) is not None:
            self.retire(served)
        self._update()

    def is_unloaded(self, name: str) -> bool:
        return name in self._unloaded

    def _update(self) -> None:
        in_use = {one.name for one in self.all.values() if one.is_retired}
        self.unloaded = [name for name in self._unloaded if name not in in_use]
        self.cards = [one.card() for one in self._served.values()]
