"""Reads `adapter_config.json` of PEFT: which modules an adapter changes, with which rank and scale."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, TypeVar

import msgspec

from blockyard.shared.errors import AdapterError

CONFIG_FILE = "adapter_config.json"
MAX_RANK = 512
MOST_PATTERNS = 1 << 14  # that a process keeps compiled
ALL_LINEAR = "all-linear"
OUTPUT_LAYERS = ("lm_head", "embed_out", "output_layer", "score", "classifier")  # that all-linear leaves out

Names = list[str] | str | None
T = TypeVar("T")
Count = Annotated[int, msgspec.Meta(ge=1, le=(1 << 63) - 1)]
Index = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]

# how A and B are initialized changes the base weights as well: the product of a base that lacks it is wrong
OTHER_BASES = ("pissa", "olora", "corda", "loftq", "lora_ga")
# fields with another computation than A and B, and what says that they are off
REFUSED: dict[str, tuple[Any, ...]] = {
    "use_dora": (False, None),
    "use_qalora": (False, None),
    "layer_replication": (None, []),
    "alora_invocation_tokens": (None,),
    "use_bdlora": (None, False),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "monteclora_config": (None,),
    "velora_config": (None,),
    "megatron_config": (None,),
}
# fields that only training reads
TRAINING = frozenset(
    [
        *("auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config"),
        *("fan_in_fan_out", "inference_mode", "init_lora_weights", "loftq_config", "lora_dropout", "lora_ga_config"),
        *("megatron_core", "peft_type", "qalora_group_size", "revision", "runtime_config", "task_type"),
    ]
)


@dataclass(frozen=True, slots=True)
class NamePattern:
    """A regular expression that names of modules are matched with."""

    field: str  # of the config
    given: str  # in the config
    expression: str
    is_whole: bool  # the whole name has to match


class AdapterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of adapter_config.json that a product depends on."""

    r: Count = 8
    lora_alpha: float = 8
    rank_pattern: dict[str, Count] | None = None
    alpha_pattern: dict[str, float] | None = None
    use_rslora: bool = False
    target_modules: Names = None
    exclude_modules: Names = None
    layers_to_transform: list[Index] | Index | None = None
    layers_pattern: Names = None
    target_parameters: list[str] | None = None
    modules_to_save: list[str] | None = None
    trainable_token_indices: list[Index] | dict[str, list[Index]] | None = None
    bias: str = "none"
    lora_bias: bool = False
    context_length: Count | None = None  # of adapters for longer contexts, which vLLM reads
    peft_version: str | None = None  # that wrote it; None: one before 0.18

    @property
    def exchanges_stacks(self) -> bool:
        """Whether A and B of a stack [experts, out, in] are of its outputs and inputs, as of releases before 0.19.1."""
        written_by = [int(number) for number in re.findall(r"\d+", (self.peft_version or "").partition("@")[0])]
        return written_by < [0, 19, 1]

    def patterns(self) -> list[NamePattern]:
        ranks, alphas = self.rank_pattern or {}, self.alpha_pattern or {}
        found = [NamePattern("rank_pattern", one, _ending(one), False) for one in ranks]
        found += [NamePattern("alpha_pattern", one, _ending(one), False) for one in alphas]
        found += [NamePattern("layers_pattern", one, _before_layer(one), False) for one in _listed(self.layers_pattern)]
        for field, names in (("target_modules", self.target_modules), ("exclude_modules", self.exclude_modules)):
            found += [NamePattern(field, names, names, True)] if isinstance(names, str) else []
        return found

    def rank_of(self, module: str) -> int:
        return _by_pattern(self.rank_pattern or {}, module, self.r)

    def scale_of(self, module: str) -> float:
        """The factor of B(A(x))."""
        alpha, rank = _by_pattern(self.alpha_pattern or {}, module, self.lora_alpha), self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def targets(self, module: str) -> bool:
        """Whether the adapter changes a module of this name, by the rules of PEFT."""
        if self.exclude_modules and _is_named(self.exclude_modules, module):
            return False
        if self.target_modules is None:
            return False
        if self.target_modules == ALL_LINEAR:
            return module.rpartition(".")[2] not in OUTPUT_LAYERS
        if isinstance(self.target_modules, str):
            return re.fullmatch(self.target_modules, module) is not None
        if module in self.target_modules:
            return True
        return _is_named(self.target_modules, module) and self._has_layer(module)

    def targets_parameter(self, parameter: str) -> bool:
        """Whether the adapter changes a parameter by its own name, as stacks of experts and some routers have."""
        return _is_named(self.target_parameters or [], parameter)

    def tokens_of(self, module: str) -> list[int]:
        """The tokens whose rows in the embedding or head of this name the adapter has trained."""
        wanted = self.trainable_token_indices or []
        if isinstance(wanted, list):
            return wanted
        return next((ids for name, ids in wanted.items() if _is_named([name], module)), [])

    def idle_targets(self, modules: Sequence[str]) -> list[str]:
        """The entries of `target_modules` that name none of these modules. With `exclude_modules` none is told."""
        if not isinstance(self.target_modules, list) or self.exclude_modules:
            return []
        return [one for one in self.target_modules if not any(_is_named([one], module) for module in modules)]

    def idle_parameters(self, parameters: Sequence[str]) -> list[str]:
        """The entries of `target_parameters` that name none of these. With `exclude_modules` none is told."""
        if self.exclude_modules:
            return []
        return [one for one in self.target_parameters or [] if not any(_is_named([one], name) for name in parameters)]

    def _has_layer(self, module: str) -> bool:
        wanted = self.layers_to_transform
        if wanted is None or wanted == []:
            return True
        found = None
        for pattern in _listed(self.layers_pattern) or [r"[^.]*"]:
            found = found or re.match(_before_layer(pattern), module)
        if found is None:
            return False
        layer = int(found["layer"])
        return layer == wanted if isinstance(wanted, int) else layer in wanted


@dataclass(frozen=True, slots=True)
class ParsedConfig:
    """A config, and what of its file nobody reads."""

    config: AdapterConfig
    notes: list[str]


def parse_config(content: bytes) -> ParsedConfig:
    """Reads the bytes of adapter_config.json. Raises AdapterError for what is not served, by its name."""
    try:
        fields = msgspec.json.decode(content, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise AdapterError(f"{CONFIG_FILE} is not a JSON object: {e}") from e
    _refuse(fields)
    try:
        config = msgspec.convert(fields, AdapterConfig)
    except msgspec.ValidationError as e:
        raise AdapterError(f"{CONFIG_FILE}: {e}") from e
    _check(config)
    known = {*AdapterConfig.__struct_fields__, *REFUSED, *TRAINING}
    unknown = sorted(name for name in fields if name not in known)
    notes = [f"{CONFIG_FILE}: {', '.join(unknown)}: not known, and not read"] if unknown else []
    return ParsedConfig(config, notes)


def _refuse(fields: Mapping[str, Any]) -> None:
    kind = fields.get("peft_type", "LORA")
    if kind in ("PROMPT_TUNING", "P_TUNING"):
        raise AdapterError(f"{CONFIG_FILE}: peft_type {kind!r} is a prompt adapter, not a LoRA adapter")
    if kind != "LORA":
        raise AdapterError(f"{CONFIG_FILE}: peft_type {kind!r} is not served; LORA is")
    for name, harmless in REFUSED.items():
        value = fields.get(name)
        if not any(value is one or (isinstance(one, list) and value == one) for one in (*harmless, None)):
            raise AdapterError(f"{CONFIG_FILE}: {name} {value!r} is not served: merge such an adapter into its base")
    how = fields.get("init_lora_weights")
    if isinstance(how, str) and how.lower().startswith(OTHER_BASES):
        raise AdapterError(
            f"{CONFIG_FILE}: init_lora_weights {how!r} is not served, because its base weights differ from the "
            "model's: save it as plain LoRA (path_initial_model_for_weight_conversion of PEFT)"
        )


def _check(config: AdapterConfig) -> None:
    if config.bias not in ("none", "all", "lora_only"):
        raise AdapterError(f"{CONFIG_FILE}: bias {config.bias!r} is not one of none, all, lora_only")
    others = config.target_parameters or config.modules_to_save or config.trainable_token_indices
    if config.target_modules is None and not others:
        raise AdapterError(f"{CONFIG_FILE}: target_modules is missing")
    for pattern in config.patterns():
        try:
            re.compile(pattern.given)
            re.compile(pattern.expression)
        except (re.error, OverflowError, RecursionError) as e:  # of numbers in it, and of its groups
            raise AdapterError(f"{CONFIG_FILE}: {pattern.given!r} is not a regular expression: {e}") from e


@lru_cache(MOST_PATTERNS)
def _compiled(expression: str) -> re.Pattern[str]:
    """`re` keeps 512, and a config may have a pattern for each module."""
    return re.compile(expression)


def _listed(names: Names) -> list[str]:
    return [names] if isinstance(names, str) else names or []


def _ending(pattern: str) -> str:
    """Matches names that end with what matches the pattern."""
    return rf"(.*\.)?({pattern})$"


def _before_layer(pattern: str) -> str:
    return rf"(?:^|.*?\.){pattern}\.(?P<layer>\d+)\."


def _is_named(names: list[str] | str, module: str) -> bool:
    """Whether a module has one of these names, or ends with one; of a text: it is matched by the expression."""
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)


def _by_pattern(patterns: Mapping[str, T], module: str, other: T) -> T:
    """The value of the first pattern that a module's name ends with."""
    for pattern, value in patterns.items():
        if _compiled(_ending(pattern)).match(module):
            return value
    return other
