"""Without a GPU the Triton kernels run in Triton's interpreter; on one, garbage is collected between tests."""

import gc
import os
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from blockyard.services.gpu_worker.loading import sleep

if not torch.cuda.is_available():  # set before Triton is imported
    os.environ["TRITON_INTERPRET"] = "1"
    import quick_interpreter

    quick_interpreter.use()


@pytest.fixture(autouse=True, scope="module")
def _stays_frozen() -> Iterator[None]:
    """A worker that sleeps lets the collector walk all that it froze: here that is all imported tests and packages."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sleep, "gc", SimpleNamespace(collect=gc.collect, unfreeze=lambda: None))
        yield


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
