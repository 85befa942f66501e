"""A GPU for each replica, or a line that says how many there are."""

from pathlib import Path

import msgspec
import pytest

from blockyard.services.launcher import gpus

from .rings import deployment


def test_gpus_are_counted_as_cuda_counts_them(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert gpus.count({}, tmp_path) == 2
    for visible, num in (("3,5,7", 3), ("GPU-8a, GPU-9b", 2), ("", 0), ("-1", 0), ("0,-1,1", 1)):
        assert gpus.count({"CUDA_VISIBLE_DEVICES": visible}, tmp_path) == num


def test_too_few_gpus_are_refused_with_their_number(tmp_path: Path) -> None:
    (tmp_path / "nvidia0").touch()
    workers = deployment(tmp_path, "--device", "cuda", "--data-parallel-size", "3").workers
    with pytest.raises(gpus.ConfigError, match="each of 3 workers needs its own GPU, and there is 1 here"):
        gpus.check(workers, {}, tmp_path)
    with pytest.raises(gpus.ConfigError, match="there are 2 here"):
        gpus.check(workers, {"CUDA_VISIBLE_DEVICES": "0,1"}, tmp_path)
    gpus.check(workers, {"CUDA_VISIBLE_DEVICES": "0,1,2"}, tmp_path)
    ranks = deployment(tmp_path, "--device", "cuda", "-dp", "2", "-tp", "2").workers
    with pytest.raises(gpus.ConfigError, match="size 2: the ranks of all workers need 4 GPUs, and there are 3 here"):
        gpus.check(ranks, {"CUDA_VISIBLE_DEVICES": "0,1,2"}, tmp_path)
    gpus.check(ranks, {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, tmp_path)
    on_cpu = deployment(tmp_path, "--device", "cpu", "--data-parallel-size", "3").workers
    gpus.check(on_cpu, {"CUDA_VISIBLE_DEVICES": ""}, tmp_path)
    gpus.check([msgspec.structs.replace(workers[0], gpu=None)], {}, tmp_path)
