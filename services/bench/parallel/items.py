"""What `blockyard bench parallel` can measure, by the names of its command line, and the layouts that have it."""

import enum
import math
from collections.abc import Callable, Sequence

import msgspec

from blockyard.services.bench.parallel import measures
from blockyard.services.bench.parallel.layouts import ONE, Layout
from blockyard.services.bench.parallel.measures import STAGES, ParallelSizes
from blockyard.services.bench.suite.served import SuiteServer
from blockyard.shared.errors import ConfigError

SUMS, START, KILL, IDLE, FLOOR, TEXTS = "all-reduce", "start", "kill", "idle", "floor-one", "texts"
PEER_ITEM = "itl-one"
ROOM = 64  # tokens of a sequence beside its prompt and its output
MORE_ROWS = (0, 8, 16)  # of a batch than its even share
GRAPH_STEP = 128  # between sizes of graphs for requests whose number changes


class ServerStart(enum.Enum):
    """The server of a layout that an item is measured on. Servers start in this order."""

    FIRST = "first"
    SECOND = "second"  # caches that outlive a start are filled
    SKEWED = "skewed"  # its router prefers some experts
    INVARIANT = "invariant"


START_FLAGS = {ServerStart.SKEWED: measures.BALANCE_FLAGS, ServerStart.INVARIANT: measures.TEXT_FLAGS}
Measure = Callable[[SuiteServer, ParallelSizes], float]
Lengths = Callable[[ParallelSizes], int]


class Item(msgspec.Struct, frozen=True):
    """A figure of a layout."""

    what: str  # with names of sizes
    unit: str
    measure: Measure | None = None  # None: it is measured without a server, or computed from others
    length: Lengths = lambda sizes: 0  # of its longest sequence
    rows: Lengths = lambda sizes: 1  # that decode at once
    start: ServerStart = ServerStart.FIRST
    of_one: bool = True  # one GPU has it, too
    is_usual: bool = True  # measured if no item is named


def _many(sizes: ParallelSizes) -> int:
    return sum(sizes.many_len)


ITEMS: dict[str, Item] = {
    SUMS: Item("sums over ranks, alone and with residual and norm", "us", of_one=False),
    "itl-one": Item("one stream, ITL", "ms", measures.one_stream, lambda sizes: sum(sizes.stream)),
    FLOOR: Item("one stream, time to read the weights to ITL", "", is_usual=False),
    "itl-some": Item(
        "{streams} running at context {context:,}, ITL",
        *("ms", measures.some_streams, lambda sizes: sum(sizes.streams_len), lambda sizes: sizes.streams),
    ),
    "itl-stage": Item(
        "{stage} running at context {context:,}, ITL",
        *("ms", measures.stage_streams, _many, lambda sizes: sizes.many // STAGES),
    ),
    "rate": Item("{many} running at context {context:,}", "tokens/s", measures.rate, _many, lambda sizes: sizes.many),
    IDLE: Item(
        "{many} running, share of a stage's time without a kernel, by one GPU's steps of {stage}", "", of_one=False
    ),
    "ttft": Item("a prompt of {prompt:,} tokens, TTFT", "ms", measures.first_token, lambda sizes: sizes.prompt),
    "ttft-long": Item(
        "a prompt of {long:,} tokens, TTFT", "ms", measures.first_token_long, lambda sizes: sizes.long_prompt
    ),
    "kv-blocks": Item("KV blocks, of all parts", "blocks", measures.kv_blocks),
    "offline": Item(
        "{requests} requests of {requests_in:,} in / {requests_out:,} out at once, over HTTP",
        *("tokens/s", measures.rate_of_all, lambda sizes: sum(sizes.requests_len), lambda sizes: sizes.requests),
        is_usual=False,
    ),
    "beside": Item(
        "prompts of {prompt:,} tokens at 1 a second beside {beside} streams, p99 ITL",
        *("ms", measures.beside_prompts, lambda sizes: max(sizes.prompt, sum(sizes.beside_len))),
        rows=lambda sizes: sizes.beside,
        is_usual=False,
    ),
    "handover": Item(
        "a prompt's KV of {prompt:,} tokens to the other group, second token later than others",
        *("ms", measures.handover, lambda sizes: sizes.prompt),
        of_one=False,
        is_usual=False,
    ),
    START: Item("second start to first token", "s", measures.first_token_s, start=ServerStart.SECOND),
    KILL: Item(
        "kill -9 of a rank to the next token",
        *("s", measures.killed_rank_s, lambda sizes: 32 + sizes.killed_output),
        start=ServerStart.SECOND,
        of_one=False,
    ),
    "balance": Item(
        "skewed routing, fullest rank to the mean once experts have moved, worst layer",
        *("", measures.fullest_to_mean, lambda sizes: sizes.streams_len[0] + measures.BALANCE_OUTPUT),
        start=ServerStart.SKEWED,
        of_one=False,
    ),
    TEXTS: Item(
        "kill -9 of a rank beside {texts} streams, share of equal texts",
        *("", measures.equal_texts, lambda sizes: sum(sizes.texts_len), lambda sizes: sizes.texts),
        start=ServerStart.INVARIANT,
        of_one=False,
        is_usual=False,
    ),
}


def has_item(layout: Layout, name: str) -> bool:
    """Whether a layout can have the figure."""
    if name in ("itl-stage", IDLE):
        return layout.name == (ONE.name if ITEMS[name].of_one else f"pp{STAGES}")
    if name == "balance":
        return layout.moves_experts
    if name == "handover":
        return layout.is_apart
    return layout != ONE or ITEMS[name].of_one


def read_items(names: Sequence[str], among: Sequence[str] = tuple(ITEMS)) -> list[str]:
    """Returns those of `among` that are named, the usual ones for no names. Raises ConfigError for an unknown one."""
    if unknown := [name for name in names if name not in ITEMS]:
        raise ConfigError(f"{unknown[0]}: no such item; the items are {', '.join(ITEMS)}")
    return [name for name in among if (name in names if names else ITEMS[name].is_usual)]


def longest(names: Sequence[str], sizes: ParallelSizes) -> int:
    """Returns the length of the longest sequence of these items."""
    return ROOM + max((ITEMS[name].length(sizes) for name in names), default=0)


def graph_sizes(names: Sequence[str], layout: Layout, sizes: ParallelSizes) -> list[int]:
    """Returns the sizes of the decode graphs that loads of these items need: others only make a start longer."""
    found = {1}
    for name in names:
        num = ITEMS[name].rows(sizes)
        share = math.ceil(num / layout.num_batches)
        found |= {share + more for more in MORE_ROWS} | {num} if num > 1 else set()
        found |= set(range(GRAPH_STEP, share, GRAPH_STEP)) if name == "offline" else set()
    return sorted(found)


def described(name: str, sizes: ParallelSizes) -> str:
    context = sizes.many_len[0] + sizes.many_len[1] // 2
    return ITEMS[name].what.format(
        streams=sizes.streams, many=sizes.many, stage=sizes.many // STAGES, context=context, prompt=sizes.prompt,
        long=sizes.long_prompt, beside=sizes.beside, requests=sizes.requests, requests_in=sizes.requests_len[0],
        requests_out=sizes.requests_len[1], texts=sizes.texts,
    )  # fmt: skip
