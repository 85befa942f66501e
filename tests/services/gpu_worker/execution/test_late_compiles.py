"""A worker that is ready compiles no kernel: a stream would wait for it for half a second."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_models import BY_NAME


@pytest.mark.cuda
@pytest.mark.alone
@pytest.mark.parametrize("name", ["llama", "mistral-window"])
def test_no_kernel_is_compiled_by_a_step_of_any_size(name: str, tmp_path: Path) -> None:
    """In a process of its own with an empty cache, as on a first start."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    BY_NAME[name].save(tmp_path / "model")
    done = subprocess.run(
        [sys.executable, "-m", "late_compiles", str(tmp_path / "model")],
        env=os.environ | {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == []
