"""The names that the launcher knows are those that the worker has formats for."""

from pathlib import Path

import pytest
import torch

from blockyard.services.gpu_worker.layers.linear import LinearLayers
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.quantization import formats
from blockyard.services.gpu_worker.quantization.registry import find_format
from blockyard.shared.errors import ConfigError
from blockyard.shared.quantization.table import READ, TABLE


def empty_table() -> WeightTable:
    return WeightTable(torch.float32, torch.device("meta"))


@pytest.mark.parametrize("method", READ)
def test_each_name_has_a_format(method: str) -> None:
    find_format({"quantization_config": {"quant_method": method}}, empty_table())


def test_each_file_has_a_name() -> None:
    files = {file.stem for folder in formats.__path__ for file in Path(folder).glob("*.py")} - {"__init__"}
    assert files == {one.module for one in TABLE if one.module}


@pytest.mark.parametrize("said", [{"quant_method": "tpu_int8"}, {"quant_method": 4}, {"bits": 4}, [4]])
def test_a_worker_refuses_an_unknown_one_too(said: object) -> None:
    with pytest.raises(ConfigError, match=r"quantization_config (has|is) .*; supported: .*mxfp4"):
        LinearLayers(empty_table(), {"quantization_config": said})
