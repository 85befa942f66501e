"""Who starts the ranks of workers: their first process where GPUs suffice, else Ray, else one line says what to do."""

import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import pytest

from blockyard.services.launcher import executors
from blockyard.shared.config import parsed_flags
from blockyard.shared.config.services.worker import RayConfig
from blockyard.shared.errors import ConfigError

from .rings import deployment

FOUR_RANKS = ("--device", "cuda", "-tp", "2", "-dp", "2")
TWO_GPUS = {"CUDA_VISIBLE_DEVICES": "0,1"}


def choose(folder: Path, environ: Mapping[str, str], *flags: str) -> list[RayConfig | None]:
    """Who starts the ranks of each worker."""
    values = parsed_flags.Values(parsed_flags.from_command_line(flags)[0])
    return [one.ray for one in executors.choose(deployment(folder, *flags).workers, values, environ)]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of what accepts connections as a cluster does. Ray is installed."""
    monkeypatch.setattr(executors, "find_spec", lambda name: name)
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize("flags", [("--distributed-executor-backend", "ray"), ("--worker-use-ray",)])
def test_ray_starts_ranks_if_a_flag_says_so(tmp_path: Path, cluster: str, flags: tuple[str, ...]) -> None:
    environ = {"RAY_ADDRESS": cluster}
    assert choose(tmp_path, environ, "--device", "cpu", "-tp", "2", *flags) == [RayConfig(address=cluster)]
    profiled = choose(tmp_path, environ, "--device", "cpu", "-pp", "2", "--ray-workers-use-nsight", *flags)
    assert profiled == [RayConfig(address=cluster, with_nsight=True)]
    assert choose(tmp_path, environ, "--device", "cpu", *flags) == [None], "one rank is a process of this machine"


def test_ray_starts_ranks_if_gpus_are_missing(tmp_path: Path, cluster: str) -> None:
    environ = {"RAY_ADDRESS": cluster, **TWO_GPUS}
    assert choose(tmp_path, environ, *FOUR_RANKS) == [RayConfig(address=cluster)] * 2
    assert choose(tmp_path, {**environ, "CUDA_VISIBLE_DEVICES": "0,1,2,3"}, *FOUR_RANKS) == [None] * 2
    assert choose(tmp_path, environ, "--device", "cpu", "-tp", "3") == [None]
    for flags, gpus, said in [
        (("--distributed-executor-backend", "mp"), "0,1", "need 4 GPUs, and there are 2 here$"),
        ((), "0", "need 4 GPUs, and there is 1 here$"),  # the first rank of each worker has a GPU of this machine
    ]:
        with pytest.raises(ConfigError, match=said):
            choose(tmp_path, {**environ, "CUDA_VISIBLE_DEVICES": gpus}, *FOUR_RANKS, *flags)


def test_the_address_is_that_of_the_last_cluster_of_this_machine(tmp_path: Path, cluster: str) -> None:
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text(f"{cluster}\n")
    for environ in ({"RAY_TMPDIR": str(tmp_path)}, {"TMPDIR": str(tmp_path), "RAY_ADDRESS": "auto"}):
        assert executors.find_cluster(environ) == cluster


def test_without_a_cluster_a_line_says_what_to_do(
    tmp_path: Path, cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    nowhere = {"RAY_TMPDIR": str(tmp_path)}
    for environ, said in [
        (nowhere, "there is no Ray cluster: start one with `ray start --head`, or set RAY_ADDRESS"),
        ({"RAY_ADDRESS": "ray://head:10001"}, "RAY_ADDRESS ray://head:10001: host:port of a cluster is needed"),
        ({"RAY_ADDRESS": "head"}, "RAY_ADDRESS head: host:port of a cluster is needed"),
        ({"RAY_ADDRESS": "127.0.0.1:1"}, "no Ray cluster answers at RAY_ADDRESS 127.0.0.1:1: .*refused"),
        ({"RAY_ADDRESS": "127.0.0.1:70000"}, "no Ray cluster answers at RAY_ADDRESS 127.0.0.1:70000: "),
    ]:
        with pytest.raises(ConfigError, match=f"^--distributed-executor-backend ray: {said}"):
            choose(tmp_path, environ, "--device", "cpu", "-tp", "2", "--worker-use-ray")
    with pytest.raises(ConfigError, match=r"need 4 GPUs.*; Ray starts ranks on GPUs of other machines: there is no"):
        choose(tmp_path, {**nowhere, **TWO_GPUS}, *FOUR_RANKS)
    monkeypatch.setattr(executors, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"backend ray: Ray is not installed: pip install 'blockyard\[ray\]'"):
        choose(tmp_path, {"RAY_ADDRESS": cluster}, "--device", "cpu", "-tp", "2", "--worker-use-ray")


def test_flags_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--worker-use-ray and --distributed-executor-backend mp disagree"):
        choose(tmp_path, {}, "--worker-use-ray", "--distributed-executor-backend", "mp")
    with pytest.raises(ConfigError, match="--ray-workers-use-nsight: Ray starts no rank here"):
        choose(tmp_path, {}, "--device", "cpu", "-tp", "2", "--ray-workers-use-nsight")


def test_gpus_are_counted_as_cuda_counts_them(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert executors.count_gpus({}, tmp_path) == 2
    for visible, num in (("3,5,7", 3), ("GPU-8a, GPU-9b", 2), ("0,0", 2), ("", 0), ("-1", 0), ("0,-1,1", 1)):
        assert executors.count_gpus({"CUDA_VISIBLE_DEVICES": visible}, tmp_path) == num


def test_too_few_gpus_are_refused_with_their_number(tmp_path: Path) -> None:
    (tmp_path / "nvidia0").touch()
    workers = deployment(tmp_path, "--device", "cuda", "--data-parallel-size", "3").workers
    with pytest.raises(ConfigError, match="each of 3 workers needs its own GPU, and there is 1 here"):
        executors.check_gpus(workers, {}, tmp_path)
    with pytest.raises(ConfigError, match="there are 2 here"):
        executors.check_gpus(workers, {"CUDA_VISIBLE_DEVICES": "0,1"}, tmp_path)
    executors.check_gpus(workers, {"CUDA_VISIBLE_DEVICES": "0,1,2"}, tmp_path)
    ranks = deployment(tmp_path, "--device", "cuda", "-dp", "2", "-tp", "2").workers
    with pytest.raises(ConfigError, match="size 2: the ranks of all workers need 4 GPUs, and there are 3 here"):
        executors.check_gpus(ranks, {"CUDA_VISIBLE_DEVICES": "0,1,2"}, tmp_path)
    executors.check_gpus(ranks, {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, tmp_path)
    on_cpu = deployment(tmp_path, "--device", "cpu", "--data-parallel-size", "3").workers
    executors.check_gpus(on_cpu, {"CUDA_VISIBLE_DEVICES": ""}, tmp_path)
    executors.check_gpus([msgspec.structs.replace(workers[0], gpu=None)], {}, tmp_path)
