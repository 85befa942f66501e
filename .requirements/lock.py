"""Pins the ranges of pyproject.toml into base.txt and test.txt. Needs `uv` on PATH; run by `make lock`."""

import re
import subprocess
from pathlib import Path

HERE = Path(__file__).parent
# torch is a step of its own in the Makefile, and brings these with its CUDA builds
ITS_OWN_STEP = re.compile(r"^(torch|triton|nvidia-.*|cuda-.*)==")
COMPILE = ["uv", "pip", "compile", "--universal", "--python-version", "3.11", "--no-header", "--no-annotate", "--quiet"]


def pins(*extra: str) -> list[str]:
    command = [*COMPILE, "--no-emit-index-url", "--no-emit-find-links", *extra, "pyproject.toml"]
    text = subprocess.run(command, cwd=HERE.parent, check=True, capture_output=True, text=True).stdout
    return [line for line in text.splitlines() if line and not ITS_OWN_STEP.match(line)]


base = pins()
(HERE / "base.txt").write_text("\n".join(base) + "\n")
# what is served is the same under test
(HERE / "test.txt").write_text("\n".join(pins("--extra", "test", "--constraint", ".requirements/base.txt")) + "\n")
