"""What one declaration says about a flag."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field


class FlagKind(enum.StrEnum):
    """How a value is written; the words are those of the help text."""

    TEXT = "text"
    INT = "integer"
    SIZE = "size, such as 4096, 4k or 4K"  # k, m, g, t are powers of 1,000, K, M, G, T of 1,024
    FLOAT = "number"
    BOOL = "switch"
    JSON = "JSON object"
    LIST = "list"


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag: the command line, the YAML key, the environment variable and the table row come from this.

    It is honoured unless `mapped` or `refused` says otherwise. `to` names the struct fields it becomes
    ("gateway.port"; "!scheduler.log_stats" for the opposite of a switch); what `resolve` settles has none.
    """

    name: str  # with dashes, without the two in front
    kind: FlagKind
    default: object  # None: unset
    help: str
    to: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()  # without the dash in front, on the command line alone
    also: tuple[str, ...] = ()  # further names, in every place where the name itself may stand
    choices: tuple[str, ...] = ()
    words: Mapping[str, str] = field(default_factory=dict)  # values besides those of the kind -> what each stands for
    takes_json: bool = False  # a text that may also be a JSON object: in YAML and Python a mapping
    bare: str | None = None  # value of the flag without one
    least: float | None = None
    most: float | None = None
    mapped: str = ""  # said once when the flag is set: what happens in its place
    refused: str = ""  # the reason why values other than the default and the harmless ones are an error
    refused_values: Mapping[str, str] = field(default_factory=dict)  # known choices with the reason each is an error
    harmless: tuple[object, ...] = ()  # values besides the default that a refused flag may have

    @property
    def status(self) -> str:
        return "refused" if self.refused else "mapped" if self.mapped else "honoured"

    @property
    def variable(self) -> str:
        return variable(self.name)

    def refusal(self, value: object) -> str:
        """Why this value cannot be had, or an empty string."""
        if str(value) in self.refused_values:
            return self.refused_values[str(value)]
        if self.refused and value != self.default and value not in self.harmless:
            return self.refused
        return ""


def variable(name: str) -> str:
    """The environment variable of a flag's name."""
    return "BLOCKYARD_" + name.upper().replace("-", "_")


def not_built(what: str) -> str:
    return f"not built yet: {what}"


FOREIGN = "foreign hardware: blockyard runs on cuda and cpu"
