"""Structured output and logits processors: --guided-decoding-backend, --structured-outputs-config with vLLM's keys."""

import re

import msgspec

from blockyard.shared.config.parsed_flags import Values
from blockyard.shared.errors import ConfigError
from blockyard.shared.messages import GrammarDefaults, GrammarEngine

FLAG, ENGINE_FLAG = "structured-outputs-config", "guided-decoding-backend"


class StructuredOutputsKeys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The keys of --structured-outputs-config."""

    backend: GrammarEngine | None = None  # None: what --guided-decoding-backend says
    disable_fallback: bool = False  # no effect: only auto tries a second engine
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    reasoning_parser: str = ""  # as --reasoning-parser
    reasoning_parser_plugin: str = ""
    enable_in_reasoning: bool = False


def check_processor_pattern(values: Values) -> None:
    """Raises ConfigError for a --logits-processor-pattern that is no regular expression."""
    try:
        re.compile(values.maybe("logits-processor-pattern", str) or "")
    except re.error as e:
        raise ConfigError(f"{values.where('logits-processor-pattern')}: not a regular expression: {e}") from e


def read_keys(values: Values) -> StructuredOutputsKeys:
    """Raises ConfigError for a key that is unknown or has a wrong type."""
    try:
        return msgspec.convert(values.maybe(FLAG, dict) or {}, StructuredOutputsKeys, strict=False)
    except msgspec.ValidationError as e:
        raise ConfigError(f"{values.where(FLAG)}: {e}") from e


def grammar_defaults(values: Values) -> GrammarDefaults:
    """Returns the settings of requests without their own. Raises ConfigError for an unknown, refused or wrong key."""
    where, keys = values.where(FLAG), read_keys(values)
    if keys.enable_in_reasoning:
        raise ConfigError(
            f"{where}: enable_in_reasoning: not built yet: with a reasoning parser grammars begin behind it"
        )
    given = values.maybe(ENGINE_FLAG, str)
    if given is not None and keys.backend is not None and keys.backend != given:
        raise ConfigError(f"{where}: backend {keys.backend} and --{ENGINE_FLAG} {given} disagree")
    return GrammarDefaults(
        engine=keys.backend or GrammarEngine(given or "auto"),
        any_whitespace=not keys.disable_any_whitespace,
        additional_properties=not keys.disable_additional_properties,
    )
