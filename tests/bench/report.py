"""The CPU figures of RESULTS.md in one run: `make bench`. Takes some minutes; the machine should do nothing else."""

import os
import platform
from pathlib import Path

import torch
from rig import table
from serving.bench_demo import demo_rows
from serving.bench_prefix import prefix_rows
from serving.bench_ring import ring_rows


def machine() -> str:
    """The processor's name, its cores, and the versions that matter."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown CPU")
    return f"{name}, {os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}"


if __name__ == "__main__":
    print(machine())
    print(f"load average at the start: {os.getloadavg()[0]:.2f}\n")
    print(table([*demo_rows(), *ring_rows(), *prefix_rows()]))
