"""Pins the ranges of pyproject.toml into base.txt, test.txt and ray.txt. Needs `uv` on PATH; run by `make lock`."""

import re
import subprocess
from pathlib import Path

HERE = Path(__file__).parent
# torch is a step of its own in the Makefile, and brings these with its CUDA builds
ITS_OWN_STEP = re.compile(r"^(torch|triton|nvidia-.*|cuda-.*)==")
TRITON = "triton==3.9.0 ; sys_platform == 'linux'"  # for tests, beside torch's CPU build
COMPILE = ["uv", "pip", "compile", "--universal", "--python-version", "3.11", "--no-header", "--no-annotate", "--quiet"]


def pins(*extra: str) -> list[str]:
    command = [*COMPILE, "--no-emit-index-url", "--no-emit-find-links", *extra, "pyproject.toml"]
    text = subprocess.run(command, cwd=HERE.parent, check=True, capture_output=True, text=True).stdout
    return [line for line in text.splitlines() if line and not ITS_OWN_STEP.match(line)]


base = pins()
(HERE / "base.txt").write_text("\n".join(base) + "\n")
# what is served is the same under test
test = sorted([*pins("--extra", "test", "--constraint", ".requirements/base.txt"), TRITON])
(HERE / "test.txt").write_text("\n".join(test) + "\n")
# of the extra `ray`, what the tests do not need
ray = pins("--extra", "test", "--extra", "ray", "--constraint", ".requirements/test.txt")
(HERE / "ray.txt").write_text("\n".join(line for line in ray if line not in test) + "\n")
