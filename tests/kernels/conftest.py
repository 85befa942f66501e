"""Without a GPU the Triton kernels of this folder run in Triton's interpreter; set before they are imported."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    import quick_interpreter

    quick_interpreter.use()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.cuda)


class NaNTorch:
    """torch, but new tensors are full of NaN, so that unwritten elements are found."""

    def __getattr__(self, name: str) -> Any:
        return self._empty if name == "empty" else getattr(torch, name)

    @staticmethod
    def _empty(size: tuple[int, ...], **more: Any) -> torch.Tensor:
        return torch.full(size, float("nan"), **more)


@pytest.fixture
def nan_torch() -> NaNTorch:
    """What the module of a kernel gets as its `torch`."""
    return NaNTorch()
