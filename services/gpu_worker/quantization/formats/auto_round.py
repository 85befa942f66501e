"""AutoRound: `quant_method` auto-round. Its files have the layout of GPTQ or of AWQ (gemm).

`packing_format` (in older files `backend`) names one of them: with "awq" in it AWQ's, with "gptq" the first version of
GPTQ's, as without any or with "auto", and otherwise (auto_round, auto_round:gptqmodel) the second one. `extra_config`
has other settings of some matrices, by name or by a regular expression that is found in the name; 16 bits are none.
`block_name_to_quantize`, or `to_quant_block_names`, has prefixes of the names that are quantized; others are if
`extra_config` has them. Documented in AutoRound (docs/step_by_step.md, auto_round/export) and in transformers
(`AutoRoundConfig`).
"""

from collections.abc import Mapping
from typing import Any

import torch

from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.quantization.formats.awq import AwqScheme
from blockyard.services.gpu_worker.quantization.formats.gptq import GptqScheme
from blockyard.services.gpu_worker.quantization.formats.layouts.integers import is_outside
from blockyard.services.gpu_worker.quantization.names import (
    NamePatterns,
    NamesOfFile,
    SettingsByName,
    SettingsByPattern,
    variants,
)
from blockyard.services.gpu_worker.quantization.scheme import Matrix, Scheme, StoredMatrix
from blockyard.shared.quantization.integers import (
    AWQ,
    FIRST,
    GPTQ,
    GPTQ_MODEL,
    NOT_QUANTIZED,
    SECOND,
    UNSAID,
    AutoRoundSettings,
    Names,
    is_expression,
)
from blockyard.shared.quantization.reading import read


class AutoRoundScheme:
    """Implements `Scheme`."""

    def __init__(self, said: Mapping[str, Any], dtype: torch.dtype) -> None:
        """dtype: of the model. Raises ConfigError for settings that it does not know."""
        self._said, self._dtype = dict(said), dtype
        own = read(said, AutoRoundSettings)
        self._blocks = NamePatterns([*_flat(own.block_name_to_quantize), *_flat(own.to_quant_block_names)])
        self._has_blocks = bool(own.block_name_to_quantize or own.to_quant_block_names)
        rules = {key: one or {} for key, one in own.extra_config.items()}
        self._by_name = SettingsByName({key: one for key, one in rules.items() if not is_expression(key)})
        patterns = {key: one for key, one in rules.items() if is_expression(key)}
        self._by_pattern = SettingsByPattern(patterns, anywhere=True)
        self._schemes: dict[tuple[int, int, bool], Scheme] = {}

    def patterns(self) -> list[NamesOfFile]:
        return [self._blocks, self._by_name, self._by_pattern]

    def stored(self, matrix: Matrix) -> StoredMatrix | None:
        rule = self._find_rule(matrix.name)
        if rule is None:
            if is_outside(matrix.name) or (self._has_blocks and not self._blocks.match(matrix.name)):
                return None
            rule = {}
        own = read(self._said | dict(rule), AutoRoundSettings)
        if own.bits >= NOT_QUANTIZED:
            return None
        return self._scheme(own).stored(matrix)

    def _find_rule(self, name: str) -> Mapping[str, Any] | None:
        of_name, of_pattern = self._by_name.find(*variants(name)), self._by_pattern.find(name)
        if of_name is not None or of_pattern is None:
            return of_name
        return of_pattern[1]

    def _scheme(self, own: AutoRoundSettings) -> Scheme:
        key = own.bits, own.group_size, own.sym
        if key not in self._schemes:
            packing = own.packing
            said = {"bits": own.bits, "group_size": own.group_size, "lm_head": True}
            if packing in UNSAID:
                packing = GPTQ
            if AWQ in packing:
                self._schemes[key] = AwqScheme(said | {"zero_point": not own.sym}, self._dtype)
            else:
                version = FIRST if GPTQ in packing and GPTQ_MODEL not in packing else SECOND
                self._schemes[key] = GptqScheme(said | {"sym": own.sym, "checkpoint_format": version}, self._dtype)
        return self._schemes[key]


def build(said: Mapping[str, Any], table: WeightTable) -> AutoRoundScheme:
    return AutoRoundScheme(said, table.dtype)


def _flat(names: Names) -> list[str]:
    """Names of a list, of lists, or with commas between them."""
    if isinstance(names, str):
        return [one.strip() for one in names.split(",")]
    return [one for some in names for one in ([some] if isinstance(some, str) else some)]
