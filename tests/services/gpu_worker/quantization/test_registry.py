"""The names that the launcher knows are those that the worker has formats for."""

import pytest
import torch

from blockyard.services.gpu_worker.layers.linear import LinearLayers
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.quantization.registry import FORMATS, find_format
from blockyard.shared.errors import ConfigError
from blockyard.shared.quantization import READ, TABLE


def empty_table() -> WeightTable:
    return WeightTable(torch.float32, torch.device("meta"))


def test_all_names_have_formats() -> None:
    assert set(FORMATS) == {None, *(one.module for one in TABLE if one.module)}
    for method in READ:
        find_format({"quantization_config": {"quant_method": method}}, empty_table())


@pytest.mark.parametrize("said", [{"quant_method": "tpu_int8"}, {"quant_method": 4}, {"bits": 4}, [4]])
def test_a_worker_refuses_an_unknown_one_too(said: object) -> None:
    with pytest.raises(ConfigError, match=r"quantization_config (has|is) .*; supported: .*mxfp4"):
        LinearLayers(empty_table(), {"quantization_config": said})
