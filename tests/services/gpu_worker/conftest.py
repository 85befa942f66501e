"""Makes this folder's own modules importable: `tests/` is off sys.path, its `kernels` would hide another package."""

import gc
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():  # set before Triton is imported
    os.environ["TRITON_INTERPRET"] = "1"
    import quick_interpreter

    quick_interpreter.use()


def _module(name: str, path: Path) -> None:
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


_HERE = Path(__file__).parent
_module("plan_driver", _HERE / "plan_driver.py")
_module("tiny_checkpoint", _HERE / "tiny_checkpoint.py")
_module("tiny_dense", _HERE / "tiny_dense.py")
_module("tiny_latent", _HERE / "tiny_latent.py")
_module("tiny_models", _HERE / "tiny_models.py")
_module("core_loop", _HERE / "core_loop.py")
_module("equality", _HERE / "equality.py")
_module("reference_ops", _HERE / "reference_ops.py")


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
