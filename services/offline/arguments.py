"""`EngineArgs`: the keywords of `LLM` as an object, and as arguments of a script's own parser."""

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

from blockyard.services.offline.engine_args import SERVER_ONLY
from blockyard.shared.config.flag_values import coerce
from blockyard.shared.config.flags import FLAGS
from blockyard.shared.config.flags.flag import Flag, FlagKind
from blockyard.shared.errors import ConfigError

T = TypeVar("T", bound="EngineArgsBase")
P = TypeVar("P", bound=argparse._ActionsContainer)  # a parser or a group of one
KEYWORDS = {flag.name.replace("-", "_"): flag for flag in FLAGS.values() if flag.name not in SERVER_ONLY}


class EngineArgsBase:
    """What is None is not given: the environment, the file of `config` or the default say it."""

    def __init__(self, **values: Any) -> None:
        """Replaced by the dataclass; here for type checkers."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{type(self).__name__} has no {name!r}; it has the flags of `blockyard serve`")

    @staticmethod
    def add_cli_args(parser: P) -> P:
        """Every flag, in a group of its own or in the one given; None where a flag is not given."""
        group = parser.add_argument_group("Blockyard") if isinstance(parser, argparse.ArgumentParser) else parser
        for name, flag in KEYWORDS.items():
            names = dict.fromkeys([f"--{flag.name}", f"--{name}", *(f"--{other}" for other in flag.also)])
            group.add_argument(*names, dest=name, help=flag.help.replace("%", "%%"), **_kind(flag))
        return parser

    @classmethod
    def from_cli_args(cls: type[T], args: argparse.Namespace) -> T:
        return cls(**{name: getattr(args, name) for name in KEYWORDS if hasattr(args, name)})


def _kind(flag: Flag) -> dict[str, Any]:
    if flag.kind is FlagKind.BOOL:
        return {"action": argparse.BooleanOptionalAction, "default": None}
    if flag.kind is FlagKind.LIST:
        return {"nargs": "+", "default": None}
    more: dict[str, Any] = {"nargs": "?", "const": flag.bare} if flag.bare is not None else {}
    return more | {"type": _reader(flag), "default": None, "metavar": flag.kind.name}


def _reader(flag: Flag) -> Callable[[str], object]:
    def read(text: str) -> object:
        try:
            return coerce(flag, text, f"--{flag.name}")
        except ConfigError as e:
            raise argparse.ArgumentTypeError(str(e)) from e

    return read


EngineArgs: type[EngineArgsBase] = dataclasses.make_dataclass(
    "EngineArgs",
    [(name, Any, dataclasses.field(default=None)) for name in KEYWORDS],
    bases=(EngineArgsBase,),
    namespace={"__module__": __name__, "__doc__": "The keywords of LLM: `LLM(**dataclasses.asdict(engine_args))`."},
)
