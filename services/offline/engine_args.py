"""Keyword arguments of `LLM` and `EngineArgs`: the flags of `blockyard serve` without its HTTP server's."""

import argparse
import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from blockyard.services.launcher import sources
from blockyard.services.launcher.models import model_files
from blockyard.shared.config import parsed_flags
from blockyard.shared.config.flag_values import coerce
from blockyard.shared.config.flags import FLAGS, GROUPS
from blockyard.shared.config.flags.flag import Flag, FlagKind
from blockyard.shared.config.parsed_flags import ParsedFlag, Values
from blockyard.shared.config.resolve import worker_notes
from blockyard.shared.errors import ConfigError

SOURCE = "LLM"  # begins each error
_ALSO_OFFLINE = {"chat-template", "served-model-name", "trust-remote-code", "allowed-local-media-path"}
_ALSO_OFFLINE |= {"chat-template-content-format"}
SERVER_ONLY = {flag.name for group in ("HTTP server", "Security") for flag in GROUPS[group]} - _ALSO_OFFLINE
SERVER_ONLY |= {"api-gateways", "enable-log-requests", "metrics-port", "metrics-names", "client-timeout"}
SERVER_ONLY |= {"max-body-bytes", "shutdown-timeout", "message-bus", "bind", "advertise", "curve-keys", "name"}
SERVER_ONLY |= {"role"}
KEYWORDS = {
    flag.name.replace("-", "_").replace(".", "_"): flag for flag in FLAGS.values() if flag.name not in SERVER_ONLY
}


def read(
    model: str | os.PathLike[str] | None, arguments: Mapping[str, object], environ: Mapping[str, str]
) -> tuple[Values, list[str]]:
    """Returns the flags' values and notes. Arguments take precedence over BLOCKYARD_* and the file of `config`.

    An argument that is None is not given. Raises ConfigError with a line for each unknown or refused one. Flags of the
    HTTP server in the environment or the file are ignored: they are meant for `serve`.
    """
    plain: dict[object, object] = {key: _plain(value) for key, value in arguments.items()}
    if model is not None:
        plain["model"] = os.fspath(model)
    arguments_given = parsed_flags.from_mapping(plain, SOURCE)
    for name, one in arguments_given.items():
        if name in SERVER_ONLY:
            raise ConfigError(f"{one.where}: is for `blockyard serve` and `run`; the offline API has no HTTP server")
    keywords = (str(key).replace("-", "_") for key, value in plain.items() if value is None)
    not_given = {KEYWORDS[keyword].name for keyword in keywords if keyword in KEYWORDS}
    arguments_given = {name: one for name, one in arguments_given.items() if name not in not_given}
    values, notes = sources.combine(arguments_given, environ, {flag.name for flag in KEYWORDS.values()})
    if not values.is_given("model") and values["worker-cls"] == "mock":
        values = values.with_given({"model": ParsedFlag(model_files.DEMO, "model")})
    return values, [*notes, *values.notes(), *worker_notes(values, is_local=True)]


def _plain(value: object) -> object:
    """Converts paths and torch dtypes to the command line's text."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    named = str(value)
    return named.removeprefix("torch.") if type(value).__name__ == "dtype" and named.startswith("torch.") else value


T = TypeVar("T", bound="EngineArgsBase")
P = TypeVar("P", bound=argparse._ActionsContainer)  # a parser or a group of one


class EngineArgsBase:
    """Base of EngineArgs. A value that is None comes from the environment, the file of `config` or the default."""

    def __init__(self, **values: Any) -> None:
        """For type checkers; the dataclass replaces it."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{type(self).__name__} has no {name!r}; it has the flags of `blockyard serve`")

    def keywords(self) -> dict[str, Any]:
        """Returns the keywords of `LLM`."""
        return {name: getattr(self, name) for name in KEYWORDS}

    @staticmethod
    def add_cli_args(parser: P) -> P:
        """Adds every flag to a parser's new group or to a given group. A flag that is not given is None."""
        group = parser.add_argument_group("Blockyard") if isinstance(parser, argparse.ArgumentParser) else parser
        for name, flag in KEYWORDS.items():
            names = dict.fromkeys([f"--{flag.name}", f"--{name}", *(f"--{other}" for other in flag.other_names)])
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
    if flag.kind is FlagKind.INTS:
        return {"nargs": "+", "type": int, "default": None}
    more: dict[str, Any] = {"nargs": "?", "const": flag.const} if flag.const is not None else {}
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

AsyncEngineArgs: type[EngineArgsBase] = dataclasses.make_dataclass(
    "AsyncEngineArgs",
    [("enable_log_requests", Any, dataclasses.field(default=None))],
    bases=(EngineArgs,),
    namespace={"__module__": __name__, "__doc__": "EngineArgs of AsyncLLMEngine. enable_log_requests has no effect."},
)
