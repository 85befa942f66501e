"""The servers that `blockyard bench pd` compares, and the items that each is measured for."""

import enum
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from blockyard.shared.errors import ConfigError

APART_FLAGS = ("--prefill-workers", "1", "--decode-workers", "1")
NO_CHECKSUMS = ("--kv-transfer-config.kv_connector_extra_config.checksum", "false")


class PDItem(enum.StrEnum):
    """A figure of a server, by the name that the command line uses."""

    TTFT = "ttft"  # a long prompt alone, with the time to its second token
    CHECKSUMS = "checksums"  # the same with checksums off
    ONE_TOKEN = "one-token"  # a long prompt that asks for one token: its prefill has nothing to send
    ITL = "itl"  # of streams, with and without long prompts beside them
    GOODPUT_LONG = "goodput-long"
    GOODPUT_SHORT = "goodput-short"


@dataclass(frozen=True, slots=True)
class Deployment:
    """A way to use the GPUs. Rows name it by `name`, the command line by `key`."""

    key: str
    name: str
    flags: tuple[str, ...]  # of `blockyard serve`
    items: frozenset[PDItem]


ONE = Deployment("one", "one", (), frozenset({PDItem.TTFT, PDItem.ONE_TOKEN}))
TWO = Deployment("two", "two", ("--data-parallel-size", "2"), frozenset({PDItem.ITL}))
APART = Deployment("apart", "apart", APART_FLAGS, frozenset(PDItem) - {PDItem.CHECKSUMS})
APART_UNCHECKED = Deployment(
    "apart-unchecked", "apart, no checksums", APART_FLAGS + NO_CHECKSUMS, frozenset({PDItem.CHECKSUMS})
)


def two_with_step(step_tokens: int) -> Deployment:
    """Two unified workers with another step size, for goodput. A step has room for one token of each sequence."""
    flags = (*TWO.flags, "--max-num-batched-tokens", str(step_tokens), "--max-num-seqs", str(min(step_tokens, 256)))
    name, goodput = f"two, {step_tokens} tokens a step", frozenset({PDItem.GOODPUT_LONG, PDItem.GOODPUT_SHORT})
    return Deployment(f"two-{step_tokens}", name, flags, goodput)


def read_items(names: Sequence[str]) -> frozenset[PDItem]:
    """All items for no names. Raises ConfigError for an unknown one. `checksums` needs `ttft`, which is added."""
    known = {item.value: item for item in PDItem}
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"{unknown[0]}: no such item; the items are {', '.join(known)}")
    items = {known[name] for name in names} or set(PDItem)
    return frozenset(items | ({PDItem.TTFT} if PDItem.CHECKSUMS in items else set()))


def needed(items: Collection[PDItem], step_sizes: Sequence[int], keys: Sequence[str] | None = None) -> list[Deployment]:
    """The servers to start for these items, in the order of their starts.

    keys: only these, among them servers with other step sizes; None: all. Raises ConfigError for one that there is not.
    """
    named = [int(key.removeprefix("two-")) for key in keys or () if re.fullmatch("two-[1-9][0-9]*", key)]
    steps = dict.fromkeys([*step_sizes, *named])
    every = [ONE, APART, APART_UNCHECKED, TWO, *map(two_with_step, steps)]
    known = [it.key for it in every]
    if unknown := [key for key in keys or () if key not in known]:
        raise ConfigError(f"--servers {unknown[0]}: no such server; the servers are {', '.join(known)} and other two-N")
    return [it for it in every if it.items & set(items) and (keys is None or it.key in keys)]
