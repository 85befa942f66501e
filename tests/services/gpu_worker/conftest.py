"""Without a GPU the Triton kernels run in Triton's interpreter; on one, garbage is collected between tests."""

import gc
import os
from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():  # set before Triton is imported
    os.environ["TRITON_INTERPRET"] = "1"
    import quick_interpreter

    quick_interpreter.use()


@pytest.fixture(autouse=True)
def _collected() -> Iterator[None]:
    """Garbage of a GPU test is collected at its end and not meanwhile, as in a worker: a collection that frees a CUDA
    graph while another one is captured breaks the capture."""
    if not torch.cuda.is_available():
        yield
        return
    gc.disable()
    yield
    gc.enable()
    gc.collect()
