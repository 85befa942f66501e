"""Operators' commands: API gateway <-> scheduler, and sleep and wake-up of workers: scheduler <-> worker."""

import enum

from blockyard.shared.messages.adapters import AdapterCard
from blockyard.shared.messages.base import Frame


class ControlVerb(enum.IntEnum):
    STATUS = 0
    RESET_PREFIX_CACHE = 1
    PAUSE = 2
    RESUME = 3
    SLEEP = 4
    WAKE_UP = 5
    LOAD_ADAPTER = 6
    UNLOAD_ADAPTER = 7


class MemoryTag(enum.StrEnum):
    """Memory that a sleeping worker allocates again: the values of `/wake_up?tags=`."""

    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"


class Control(Frame, frozen=True):
    """An operator's command to a scheduler. Idempotent."""

    request_id: str
    verb: ControlVerb
    level: int = 1  # sleep: 1 moves weights to host memory, 2 drops them; both drop KV
    drain: bool = False  # pause: True lets running sequences finish, False holds them
    clear_cache: bool = True  # pause: compute all KV again, as after a change of weights
    tags: list[MemoryTag] = []  # wake_up: only these; empty: all
    adapter: str = ""  # name of the adapter to load or unload
    adapter_path: str = ""  # load: of its folder
    replace: bool = False  # load: the name may be in use; running requests finish with the adapter that they began with
    first_use: bool = False  # load: a request names it, and no operator; what an operator has unloaded stays unknown
    is_prompt: bool = False  # it is a prompt adapter; False: a LoRA adapter
    is_repeated: bool = False  # unload: told to a scheduler that has died; what was asked for since then stays


class Controlled(Frame, frozen=True):
    """Answers Control once the command is done."""

    request_id: str
    status: int  # HTTP status
    message: str
    sleep_level: int
    paused: bool
    freed_bytes: int = 0  # by the workers that sleep now
    field: str = ""  # of the command that is wrong
    adapters: list[AdapterCard] | None = None  # that are served once the command is done; None: it is of none
    unloaded: list[str] = []  # with `adapters`: see ModelCard


class Sleep(Frame, frozen=True):
    """scheduler -> worker: drop plans and slots, and free memory. The next Attach wakes the worker up."""

    scheduler: int
    level: int


class Wake(Frame, frozen=True):
    """scheduler -> worker: allocate some memory again and stay asleep, answered with Slept. The next Attach
    allocates the rest."""

    scheduler: int
    tags: list[MemoryTag]


class Slept(Frame, frozen=True):
    freed_bytes: int
