"""The names that the launcher knows are those that the worker has formats for."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import fields

from blockyard.services.gpu_worker.layers.linear import LinearLayers
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.quantization import formats
from blockyard.services.gpu_worker.quantization.registry import find_format
from blockyard.shared.errors import ConfigError
from blockyard.shared.quantization.method import check_quantization
from blockyard.shared.quantization.table import NAMES, READ, TABLE


def empty_table() -> WeightTable:
    return WeightTable(torch.float32, torch.device("meta"))


@pytest.mark.parametrize("method", READ)
def test_each_name_has_a_format(method: str) -> None:
    find_format({"quantization_config": {"quant_method": method}}, empty_table())


def test_each_file_has_a_name() -> None:
    files = {file.stem for folder in formats.__path__ for file in Path(folder).glob("*.py")} - {"__init__"}
    assert files == {one.module for one in TABLE if one.module}


def refusal(method: str, field: str, read: Callable[[dict[str, Any]], object]) -> str:
    """The error of a value that the field cannot have."""
    for value in (5, [5]):
        try:
            read({"quantization_config": {"quant_method": method, field: value}})
        except ConfigError as e:
            return str(e)
    return ""


@pytest.mark.parametrize("method", READ)
def test_a_format_reads_the_fields_that_the_launcher_checks(method: str) -> None:
    settings = NAMES[method].settings
    assert settings is not None
    for field in {one.name for one in fields(settings)} - {"quant_method"}:
        want = refusal(method, field, check_quantization)
        assert want, field
        assert refusal(method, field, partial(find_format, table=empty_table())) == want


@pytest.mark.parametrize("said", [{"quant_method": "tpu_int8"}, {"quant_method": 4}, {"bits": 4}, [4]])
def test_a_worker_refuses_an_unknown_one_too(said: object) -> None:
    with pytest.raises(ConfigError, match=r"quantization_config (has|is) .*; supported: .*mxfp4"):
        LinearLayers(empty_table(), {"quantization_config": said})
