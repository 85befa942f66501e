"""The declaration of a flag."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


class FlagKind(enum.StrEnum):
    """The type of a value; the text appears in the help."""

    TEXT = "text"
    INT = "integer"
    SIZE = "size, such as 4096, 4k or 4K"  # k, m, g, t are powers of 1,000, K, M, G, T of 1,024
    FLOAT = "number"
    BOOL = "switch"
    JSON = "JSON object"
    LIST = "list"
    INTS = "list of integers"


_KINDS = {bool: FlagKind.BOOL, int: FlagKind.INT, float: FlagKind.FLOAT, list: FlagKind.LIST}  # by type of a default


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag: its command line name, YAML key, environment variable and row in FLAGS.md.

    It is honoured unless `mapped` or `refused` is set. `to` names the struct fields it sets ("gateway.port", or
    "!scheduler.log_stats" for the opposite of a switch); flags that `resolve` reads have none.
    """

    name: str  # with dashes, without the leading two
    default: object  # None: unset
    help: str
    to: tuple[str, ...] = ()
    short_names: tuple[str, ...] = ()  # without their one dash; only on the command line
    other_names: tuple[str, ...] = ()  # valid wherever the name is
    choices: tuple[str, ...] = ()
    any_case: bool = False  # choices are read without regard to case
    named_values: Mapping[str, str] = field(default_factory=dict)  # accepted besides the kind's values -> their meaning
    takes_json: bool = False  # its text, or a text of its list, may be a JSON object: a mapping in YAML and Python
    const: str | None = None  # the value if the command line gives the flag without one, as argparse's
    ge: float | None = None  # smallest valid number
    le: float | None = None  # largest valid number
    mapped: str = ""  # the effect of the flag here, printed when it is set
    refused: str = ""  # reason why values besides the default and harmless ones are errors
    refused_values: Mapping[str, str] = field(default_factory=dict)  # known values -> reason why each is an error
    harmless: tuple[object, ...] = ()  # values besides the default that a refused flag may have
    kind: FlagKind = FlagKind.TEXT  # left out: that of the default

    def __post_init__(self) -> None:
        if self.kind is FlagKind.TEXT:
            object.__setattr__(self, "kind", _KINDS.get(type(self.default), FlagKind.TEXT))

    @property
    def status(self) -> str:
        return "refused" if self.refused else "mapped" if self.mapped else "honoured"

    @property
    def variable(self) -> str:
        return variable(self.name)

    def refusal(self, value: object) -> str:
        """Returns why this value is refused, or an empty string."""
        if str(value) in self.refused_values:
            return self.refused_values[str(value)]
        if self.refused and value != self.default and value not in self.harmless:
            return self.refused
        return ""


def switch(name: str, help: str, to: tuple[str, ...] = (), **fields: Any) -> Flag:
    """Returns a switch that is off by default. fields: the others of `Flag`."""
    return Flag(name, False, help, to, **fields)


def variable(name: str) -> str:
    """Returns the environment variable of a flag."""
    return "BLOCKYARD_" + name.upper().replace("-", "_").replace(".", "_")


def not_built(what: str) -> str:
    return f"not built yet: {what}"


FOREIGN = "foreign hardware: blockyard runs on cuda and cpu"
