"""The flags of adapters: what workers hold, which adapters a server begins with, and flags without an effect."""

import os
from collections.abc import Sequence

import msgspec

from blockyard.shared.config.parsed_flags import Values
from blockyard.shared.config.services.lora import AdapterSettings, AdapterSource, LoraConfig, PromptConfig
from blockyard.shared.errors import ConfigError

MODULES = "lora-modules"
QLORA = "qlora-adapter-name-or-path"
PROMPTS = "prompt-adapters"
ENABLING = (MODULES, QLORA, "enable-lora")  # each of these flags alone makes workers serve LoRA adapters
ENABLING_PROMPTS = (PROMPTS, "enable-prompt-adapter")  # ... and prompt adapters
LONG = "long-lora-scaling-factors"
MOST_TOKENS = "max-prompt-adapter-token"
OF_PROMPTS = ("max-prompt-adapters", MOST_TOKENS)  # flags that do nothing without prompt adapters
# flags that do nothing without LoRA adapters
OF_ADAPTERS = (
    "max-loras",
    "max-lora-rank",
    "max-cpu-loras",
    "lora-dtype",
    "lora-extra-vocab-size",
    "lora-dir",
    "lora-target-modules",
    "lora-max-wait",
    "enable-lora-bias",
    "fully-sharded-loras",
    LONG,
)
MOST_SHOWN = 80  # characters of a wrong value


class _Module(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """--lora-modules as JSON."""

    name: str
    path: str
    base_model_name: str | None = None


def are_enabled(values: Values) -> bool:
    """Whether the workers serve adapters: --lora-modules implies it."""
    return any(values[name] for name in ENABLING)


def worker_config(values: Values, given: Sequence[AdapterSource] = ()) -> LoraConfig | None:
    """Returns a worker's limits; None without adapters. given: adapters of the start. Raises ConfigError."""
    if not are_enabled(values):
        return None
    most, in_memory = values.get("max-loras", int), values.maybe("max-cpu-loras", int)
    if in_memory is not None and in_memory < most:
        where = values.where("max-cpu-loras")
        raise ConfigError(f"{where} {in_memory}: at least --max-loras, {most}, are needed in host memory")
    return LoraConfig(
        max_loras=most,
        max_cpu_loras=most if in_memory is None else in_memory,
        max_rank=values.get("max-lora-rank", int),
        dtype=msgspec.convert(values["lora-dtype"], LoraConfig.__annotations__["dtype"]),
        with_bias=values.get("enable-lora-bias", bool),
        extra_vocab_size=values.get("lora-extra-vocab-size", int),
        fully_sharded=values.get("fully-sharded-loras", bool),
        target_modules=[str(name) for name in values.get("lora-target-modules", list)],
        with_experts=any(one.has_experts for one in given),
        long_factors=_long_factors(values),
    )


def _long_factors(values: Values) -> list[int]:
    given = values.maybe(LONG, str) or ""
    try:
        factors = [float(one) for one in given.strip("()[] ").replace(",", " ").split()]
    except ValueError as e:
        raise ConfigError(f"{values.where(LONG)} {given}: numbers are expected, such as 2,4") from e
    if wrong := [one for one in factors if one < 2 or one != int(one)]:
        raise ConfigError(f"{values.where(LONG)} {given}: {wrong[0]:g} is not a whole number of at least 2")
    return sorted({int(one) for one in factors})


def serves_prompts(values: Values) -> bool:
    """Whether the workers serve prompt adapters: --prompt-adapters implies it."""
    return any(values[name] for name in ENABLING_PROMPTS)


def prompt_config(values: Values) -> PromptConfig | None:
    """Returns a worker's limits of prompt adapters; None without them. Raises ConfigError."""
    if not serves_prompts(values):
        return None
    most, max_tokens = values.get("max-prompt-adapters", int), values.get(MOST_TOKENS, int)
    if max_tokens == 0:
        name = next(name for name in ENABLING_PROMPTS if values[name])
        raise ConfigError(f"{values.where(name)}: needs --{MOST_TOKENS}, the most virtual tokens of an adapter")
    if (num := len(values.get(PROMPTS, list))) > most:
        raise ConfigError(f"{values.where(PROMPTS)}: {num} adapters; --max-prompt-adapters is {most}")
    return PromptConfig(max_adapters=most, max_tokens=max_tokens)


def scheduler_settings(values: Values, sources: list[AdapterSource]) -> AdapterSettings:
    """sources: the adapters that a server begins with, with the paths of their folders."""
    return AdapterSettings(sources=sources, max_wait_s=values.get("lora-max-wait", float))


def sources(values: Values) -> list[AdapterSource]:
    """Returns the adapters that a server begins with, as the flags name them. Raises ConfigError."""
    found = [_read(str(given), values) for given in values.get(MODULES, list)]
    if (qlora := values.maybe(QLORA, str)) is not None:
        found.append(AdapterSource(name=qlora, path=qlora))
    found += [_read_pair(str(given), PROMPTS, values, is_prompt=True) for given in values.get(PROMPTS, list)]
    served = values.get("served-model-name", list) or [values.get("model", str)]
    names = set[str](served)
    for source in found:
        if source.name in names:
            what = "the name of the model itself" if source.name in served else "given twice"
            raise ConfigError(f"{values.where(PROMPTS if source.is_prompt else MODULES)}: {source.name!r} is {what}")
        names.add(source.name)
    return found


def check_folder(values: Values) -> None:
    """Raises ConfigError for a --lora-dir that is no folder."""
    path = values.maybe("lora-dir", str)
    if path is not None and not os.path.isdir(os.path.expanduser(path)):
        raise ConfigError(f"{values.where('lora-dir')} {path}: no such folder")


def notes(values: Values) -> list[str]:
    """Returns a line for flags that have no effect."""
    found = []
    serves_lora, has_prompts = are_enabled(values), serves_prompts(values)
    of_lora = [name for name in OF_ADAPTERS if not (name == "lora-dir" and has_prompts)]  # it has folders of both
    for names, is_on, enabling in (
        (of_lora, serves_lora, "enable-lora"),
        (OF_PROMPTS, has_prompts, "enable-prompt-adapter"),
    ):
        given = [name for name in names if values.is_given(name)]
        if given and not is_on:
            found.append(f"{', '.join(f'--{name}' for name in given)}: nothing without --{enabling}")
    return found


def _read(given: str, values: Values) -> AdapterSource:
    where = values.where(MODULES)
    if given.lstrip().startswith("{"):
        try:
            module = msgspec.json.decode(given, type=_Module)
        except msgspec.DecodeError as e:
            raise ConfigError(f"{where}: {given[:MOST_SHOWN]!r}: {e}") from e
        source = AdapterSource(name=module.name, path=module.path, parent=module.base_model_name or "")
        return _checked(source, given, where)
    return _read_pair(given, MODULES, values, or_else=" nor a JSON object")


def _read_pair(given: str, flag: str, values: Values, or_else: str = "", *, is_prompt: bool = False) -> AdapterSource:
    """Reads name=path. or_else: what else the text might be."""
    where = values.where(flag)
    name, sign, path = given.partition("=")
    if not sign:
        raise ConfigError(f"{where}: {given[:MOST_SHOWN]!r} is {'neither' if or_else else 'not'} name=path{or_else}")
    return _checked(AdapterSource(name=name.strip(), path=path.strip(), is_prompt=is_prompt), given, where)


def _checked(source: AdapterSource, given: str, where: str) -> AdapterSource:
    if not source.name or not source.path:
        raise ConfigError(f"{where}: {given[:MOST_SHOWN]!r} has no name or no path")
    return source
