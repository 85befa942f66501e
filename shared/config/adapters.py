"""The flags of LoRA adapters: what workers hold, which adapters a server begins with, and flags without an effect."""

import os

import msgspec

from blockyard.shared.config.parsed_flags import Values
from blockyard.shared.config.services.lora import AdapterSettings, AdapterSource, LoraConfig
from blockyard.shared.errors import ConfigError

MODULES = "lora-modules"
QLORA = "qlora-adapter-name-or-path"
ENABLING = (MODULES, QLORA, "enable-lora")  # each of these flags alone makes workers serve adapters
# flags that do nothing without adapters
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


def worker_config(values: Values) -> LoraConfig | None:
    """Returns a worker's limits; None without adapters. Raises ConfigError."""
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
    )


def scheduler_settings(values: Values, sources: list[AdapterSource]) -> AdapterSettings:
    """sources: the adapters that a server begins with, with the paths of their folders."""
    return AdapterSettings(sources=sources, max_wait_s=values.get("lora-max-wait", float))


def sources(values: Values) -> list[AdapterSource]:
    """Returns the adapters that a server begins with, as the flags name them. Raises ConfigError."""
    found = [_read(str(given), values) for given in values.get(MODULES, list)]
    if (qlora := values.maybe(QLORA, str)) is not None:
        found.append(AdapterSource(name=qlora, path=qlora))
    served = values.get("served-model-name", list) or [values.get("model", str)]
    names = set[str](served)
    for source in found:
        if source.name in names:
            what = "the name of the model itself" if source.name in served else "given twice"
            raise ConfigError(f"{values.where(MODULES)}: {source.name!r} is {what}")
        names.add(source.name)
    return found


def check_folder(values: Values) -> None:
    """Raises ConfigError for a --lora-dir that is no folder."""
    path = values.maybe("lora-dir", str)
    if path is not None and not os.path.isdir(os.path.expanduser(path)):
        raise ConfigError(f"{values.where('lora-dir')} {path}: no such folder")


def notes(values: Values) -> list[str]:
    """Returns a line for flags that have no effect."""
    given = [name for name in OF_ADAPTERS if values.is_given(name)]
    if are_enabled(values) or not given:
        return []
    return [f"{', '.join(f'--{name}' for name in given)}: nothing without --enable-lora"]


def _read(given: str, values: Values) -> AdapterSource:
    where = values.where(MODULES)
    if given.lstrip().startswith("{"):
        try:
            module = msgspec.json.decode(given, type=_Module)
        except msgspec.DecodeError as e:
            raise ConfigError(f"{where}: {given[:MOST_SHOWN]!r}: {e}") from e
        source = AdapterSource(name=module.name, path=module.path, parent=module.base_model_name or "")
    else:
        name, sign, path = given.partition("=")
        if not sign:
            raise ConfigError(f"{where}: {given[:MOST_SHOWN]!r} is neither name=path nor a JSON object")
        source = AdapterSource(name=name.strip(), path=path.strip())
    if not source.name or not source.path:
        raise ConfigError(f"{where}: {given[:MOST_SHOWN]!r} has no name or no path")
    return source
