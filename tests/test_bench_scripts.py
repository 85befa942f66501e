"""Scripts of tests/bench are run by hand; this test imports all of them, so that no change leaves one behind."""

import os
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parent / "bench"
PATHS = (BENCH.parents[1] / ".src", BENCH, BENCH.parent / "support")


def test_every_script_imports() -> None:
    files = sorted(BENCH.rglob("*.py"))
    names = [".".join(path.relative_to(BENCH).with_suffix("").parts) for path in files]
    code = "import sys\nfrom importlib import import_module\nfor name in sys.argv[1:]:\n    import_module(name)"
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, PATHS))}
    run = subprocess.run(
        [sys.executable, "-P", "-c", code, *names], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert len(names) > 50
    assert run.returncode == 0, run.stderr[-2000:]
