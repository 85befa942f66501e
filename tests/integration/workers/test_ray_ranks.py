"""Ranks that a real Ray cluster starts on two of its nodes: the texts of one rank, whatever is killed meanwhile.

Nodes of one machine, with a CPU each.
"""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import rig
from rig import Server, completion, family, serve
from tcp_addresses import free_port
from tiny_models import BY_NAME
from worker.every_architecture import PROMPTS, TOKENIZER

pytestmark = pytest.mark.skipif(
    find_spec("ray") is None, reason="RAY IS NOT INSTALLED: no rank is started by Ray; `make test RAY=1` installs it"
)

FLAGS = ("--device", "cpu", "--dtype", "float32", "--detokenizers", "1", "--tokenizers", "1", "--cpu-threads", "1")
ON_RAY = ("-tp", "2", "--distributed-executor-backend", "ray")
DEMO_PROMPTS = [f"def stream_{i}():" for i in range(3)]
NUM_TOKENS = 80
GONE_S = 30.0
RANK, RAYLET = "RankActor.follow", "raylet/raylet"  # titles that Ray gives
START_S = 60.0
STORE = ("--object-store-memory", "80000000")  # the least that Ray takes; a third of the machine's memory otherwise
# a node that is dead is so after 4 s and not after 15
QUICK = {"RAY_health_check_initial_delay_ms": "1000", "RAY_health_check_period_ms": "1000"}
QUICK |= {"RAY_health_check_failure_threshold": "3", "RAY_health_check_timeout_ms": "3000"}


class RayCluster:
    """Each node is a process group of its own."""

    def __init__(self, folder: Path, num_cpus: int = 1) -> None:
        """folder: with a short path, because Ray makes sockets below it. num_cpus: of the first node."""
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        self.address, self._folder = f"127.0.0.1:{port}", folder
        head = ("--head", "--port", str(port), "--temp-dir", str(folder), "--include-dashboard", "false")
        self._groups = [self._start(*head, "--num-cpus", str(num_cpus))]
        until = time.monotonic() + START_S
        while True:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", port), 1).close()
                return
            assert time.monotonic() < until, "Ray has not started"
            time.sleep(0.05)

    def add_node(self) -> int:
        """Returns the number of the node, which joins the cluster some seconds later. The first one has number 0."""
        self._groups.append(self._start("--address", self.address, "--num-cpus", "1"))
        return len(self._groups) - 1

    def processes(self, node: int) -> dict[int, str]:
        """Titles of the node's processes, and of ranks there, by process id."""
        return family(self._groups[node].pid)

    def signal(self, node: int, title: str, number: signal.Signals) -> None:
        """Kills or stops the process of a node whose title has these words."""
        [pid] = [pid for pid, found in self.processes(node).items() if title in found]
        os.kill(pid, number)

    def close(self) -> None:
        for group in self._groups:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group.pid, signal.SIGKILL)
            group.wait()

    def _start(self, *flags: str) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-P", "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
        with (self._folder / "start.log").open("ab") as log:
            return subprocess.Popen(
                [*command, "--num-gpus", "0", *STORE, *flags],
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=os.environ | QUICK,
            )


@contextlib.contextmanager
def two_nodes(num_cpus: int) -> Iterator[RayCluster]:
    """num_cpus: of the first node."""
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder, pytest.MonkeyPatch.context() as patch:
        cluster = RayCluster(Path(folder), num_cpus)
        patch.setenv("RAY_ADDRESS", cluster.address)
        try:
            cluster.add_node()
            yield cluster
        finally:
            cluster.close()


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with two_nodes(1) as made:
        yield made


Prompts = Sequence[str | list[int]]


def texts(server: Server, meanwhile: Callable[[], object] | None = None, prompts: Prompts = DEMO_PROMPTS) -> list[str]:
    """The texts of greedy and seeded streams."""
    bodies = [
        completion(NUM_TOKENS, prompt=prompt, seed=i, temperature=0.7 * (i % 2)) for i, prompt in enumerate(prompts)
    ]
    return asyncio.run(rig.texts(server.url, bodies, meanwhile))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("-tp", "4", "--rank-timeout", "1"), "needed: 4 CPUs, 1 or more on this machine; free: 1 of 1 on "),
        (("-tp", "2", "--ray-workers-use-nsight"), "nsight is not installed"),
    ],
)
def test_ranks_that_cannot_be_started_end_the_start(cluster: RayCluster, flags: tuple[str, ...], said: str) -> None:
    command = [sys.executable, "-P", "-m", "blockyard", "serve", "demo", "--port", str(free_port()), *FLAGS]
    command += ["--worker-use-ray", *flags]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert ended.returncode in (2, 3), ended.stderr
    assert said in ended.stderr.splitlines()[-1], ended.stderr


@pytest.mark.timeout(400)
def test_texts_are_those_of_one_rank_when_a_rank_or_its_node_is_lost(cluster: RayCluster, tmp_path: Path) -> None:
    """Killed, or stopped, so that it is silent and all its links stay open."""
    with serve("demo", *FLAGS) as server:
        expected = texts(server)
    with serve("demo", *FLAGS, *ON_RAY, log=tmp_path / "log") as server:
        assert texts(server) == expected
        for number in (signal.SIGKILL, signal.SIGSTOP):
            before = actors(cluster, 1)
            assert texts(server, partial(cluster.signal, 1, RANK, number)) == expected
            assert actors(cluster, 1) and not before & actors(cluster, 1), "it is started again"

        def lose_node() -> None:
            cluster.signal(1, RAYLET, signal.SIGKILL)
            cluster.add_node()

        assert texts(server, lose_node) == expected
        before = actors(cluster, 2)
        assert texts(server, partial(cluster.signal, 2, RAYLET, signal.SIGSTOP)) == expected
        assert actors(cluster, 2) == before, "a rank needs Ray for its start alone"
        kill_launcher(server, cluster, 1, 2)


def kill_launcher(server: Server, cluster: RayCluster, *nodes: int) -> None:
    """All processes of the ring end, those of ranks on these nodes too."""
    others = set(server.family())
    server.process.kill()
    server.process.wait()
    until = time.monotonic() + GONE_S
    while any(actors(cluster, node) for node in nodes) or any(map(exists, others)):
        assert time.monotonic() < until, "a process outlives the launcher"
        time.sleep(0.05)


def actors(cluster: RayCluster, node: int) -> set[int]:
    """Ranks on a node, by process id."""
    return {pid for pid, title in cluster.processes(node).items() if RANK in title}


def exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@pytest.mark.timeout(200)
def test_replicas_with_the_experts_together(tmp_path: Path) -> None:
    """The leaders are on the first node, and of the other ranks one has no room there."""
    model = str(tmp_path / "model")
    BY_NAME["qwen3-moe"].save(tmp_path / "model")
    of_model = (model, "--tokenizer", str(TOKENIZER), *FLAGS)
    with serve(*of_model) as server:
        expected = texts(server, None, PROMPTS)
    with two_nodes(3) as nodes, serve(*of_model, "-dp", "2", "--enable-expert-parallel", *ON_RAY) as server:
        assert texts(server, None, PROMPTS) == expected
        before = actors(nodes, 1)
        assert texts(server, partial(nodes.signal, 1, RANK, signal.SIGKILL), PROMPTS) == expected
        assert len(actors(nodes, 1)) == len(before) == 1 and not before & actors(nodes, 1)
        kill_launcher(server, nodes, 0, 1)
