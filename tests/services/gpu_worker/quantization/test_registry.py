"""The names that the launcher knows are those that the worker has formats for."""

import pytest
import torch

from blockyard.services.gpu_worker.layers.linear import LinearLayers
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.quantization.registry import FORMATS, find_format
from blockyard.shared.errors import ConfigError
from blockyard.shared.quantization import METHODS


def test_all_names_have_formats() -> None:
    assert set(FORMATS) == {None, *METHODS}
    for method in METHODS:
        find_format({"quantization_config": {"quant_method": method}})


@pytest.mark.parametrize("said", [{"quant_method": "awq"}, {"quant_method": 4}, {"bits": 4}, [4]])
def test_a_worker_refuses_an_unknown_one_too(said: object) -> None:
    with pytest.raises(ConfigError, match=r"quantization_config has .*; supported: mxfp4"):
        LinearLayers(WeightTable(torch.float32, torch.device("meta")), {"quantization_config": said})
