"""A worker with ranks on two hosts gives the texts of one rank, whatever ends or is cut off meanwhile.

Hosts are addresses of the loopback interface, and network namespaces where this user may make some.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest
import rig
from hypothesis import settings
from rig import completion, family, registry
from tcp_addresses import free_port, tcp_bus
from tiny_models import BY_NAME
from worker.every_architecture import PROMPTS, TOKENIZER

from blockyard.shared.bus.curve import write_keys
from blockyard.shared.config.services.process import BusConfig

SRC = Path(__file__).parents[3] / ".src"
SERVICES = ("message-bus", "tokenizer-pool", "scheduler", "detokenizer", "api-gateway")
READY_S = 90.0
GONE_S = 30.0
NUM_TOKENS = 80
DEMO_PROMPTS = [f"def stream_{i}():" for i in range(3)]
PARTITION_S = 10.0  # a rank may be silent for 4 s
MODEL = ("--device", "cpu", "--dtype", "float32")


@dataclass
class HostsRing:
    """`within` runs a command in the network of a host."""

    folder: Path
    addresses: Sequence[str]
    within: Sequence[Sequence[str]] = ((), ())
    hosts: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    bus: Sequence[str] = ()  # flags; empty: of a message bus of its own
    model: Sequence[str] = ("demo",)  # and flags of all services

    def __post_init__(self) -> None:
        if not self.bus:
            write_keys(self.folder / "keys")
            registry = f"tcp://{self.addresses[0]}:{free_port()}"
            self.bus = "--message-bus", registry, "--curve-keys", str(self.folder / "keys")

    def run(self, host: int, service: str, *flags: str, log: str) -> subprocess.Popen[bytes]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("BLOCKYARD_")}
        command = [sys.executable, "-P", "-m", "blockyard", "run", service, *self.model, *self.bus, *flags]
        with (self.folder / log).open("ab") as out:
            process = subprocess.Popen(
                [*self.within[host], *command],
                env=kept | {"PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"},
                stdout=out,
                stderr=out,
            )
        self.stack.callback(end, process)
        return process

    def start_services(self) -> None:
        """Starts all but the workers, on the first host."""
        own = ("--bind", f"tcp://{self.addresses[0]}", "--advertise", self.addresses[0])
        for service in SERVICES:
            of_gateway = ("--uds", str(self.folder / "http")) if service == "api-gateway" else ()
            self.run(0, service, *own, *of_gateway, log=service)

    def start_host(self, number: int, *flags: str) -> subprocess.Popen[bytes]:
        own = ("--bind", f"tcp://{self.addresses[number]}", "--node-rank", str(number), "--nnodes", "2")
        self.hosts[number] = self.run(
            number, "gpu-worker", *MODEL, *own, "--name", "group", *flags, log=f"host {number}"
        )
        return self.hosts[number]

    def start_replica(self, number: int, *flags: str) -> None:
        """On the host of that number."""
        own = ("--bind", f"tcp://{self.addresses[number]}", "--data-parallel-rank", str(number), "-dp", "2")
        self.hosts[number] = self.run(
            number, "gpu-worker", *MODEL, *own, "--enable-expert-parallel", *flags, log=f"host {number}"
        )

    def rank(self, host: int, title: str) -> int:
        """Returns the process of a host with this in its title."""
        return next(pid for pid, name in family(self.hosts[host].pid).items() if title in name)

    def log(self, host: int) -> str:
        return (self.folder / f"host {host}").read_text("utf-8", "replace")


def end(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
    process.kill()
    process.wait()


async def texts(
    ring: HostsRing, meanwhile: Callable[[], object] | None = None, prompts: Sequence[str | list[int]] = DEMO_PROMPTS
) -> list[str]:
    """The texts of greedy and seeded streams."""
    bodies = [
        completion(NUM_TOKENS, prompt=prompt, seed=i, temperature=0.7 * (i % 2)) for i, prompt in enumerate(prompts)
    ]
    connector = aiohttp.UnixConnector(str(ring.folder / "http"))
    return await rig.texts("http://ring", bodies, meanwhile, connector)


async def wait_ready(ring: HostsRing) -> None:
    deadline = time.monotonic() + READY_S
    connector = aiohttp.UnixConnector(str(ring.folder / "http"))
    async with aiohttp.ClientSession(connector=connector) as session:
        while True:
            try:
                async with session.get("http://ring/ready") as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            assert time.monotonic() < deadline, "the ring is not ready"
            await asyncio.sleep(0.05)


def wait_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + GONE_S
    while left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, f"{left} outlive their launcher"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def ring(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostsRing]:
    made = HostsRing(tmp_path_factory.mktemp("ring"), ("127.0.0.1", "127.0.0.2"))
    with made.stack:
        made.start_services()
        yield made


@pytest.fixture(scope="module")
def expected(ring: HostsRing) -> list[str]:
    """The texts of one rank."""
    worker = ring.run(0, "gpu-worker", *MODEL, "--bind", "tcp://127.0.0.1", "--advertise", "127.0.0.1", log="worker")
    asyncio.run(wait_ready(ring))
    found = asyncio.run(texts(ring))
    end(worker)
    return found


def test_ranks_on_two_hosts_give_the_texts_of_one_and_end_together(ring: HostsRing, expected: list[str]) -> None:
    """Also after a rank of the other host is killed. When a launcher is killed its ranks end."""
    for host in (0, 1):
        ring.start_host(host, "-tp", "2", "-pp", "2")
    assert asyncio.run(texts(ring)) == expected
    killed = ring.rank(1, "rank 3")
    assert asyncio.run(texts(ring, lambda: os.kill(killed, signal.SIGKILL))) == expected
    assert "rank 3 of 4 has ended with code -9; all ranks end" in ring.log(1)
    assert " of 4 has ended; all ranks end" in ring.log(0)
    here, there = ([*family(ring.hosts[host].pid)] for host in (0, 1))
    assert len(there) == 4, "a launcher, a worker, its two ranks"
    ring.hosts[1].kill()
    ring.hosts[1].wait()
    wait_gone(there)
    wait_gone(here[1:])
    end(ring.hosts[0])
    assert ring.hosts[0].returncode == 0


def test_replicas_on_two_hosts_have_the_experts_together(tmp_path: Path) -> None:
    """The same texts after one is killed, which ends both.

    --hypothesis-profile=long: the texts of one rank, and two ranks each.
    """
    is_long = settings.get_current_profile_name() == "long"
    BY_NAME["qwen3-moe"].save(tmp_path / "model")
    model = (str(tmp_path / "model"), "--tokenizer", str(TOKENIZER))
    ring = HostsRing(tmp_path, ("127.0.0.1", "127.0.0.2"), model=model)
    with ring.stack:
        ring.start_services()
        expected = None
        if is_long:
            one = ring.run(0, "gpu-worker", *MODEL, "--bind", "tcp://127.0.0.1", "--advertise", "127.0.0.1", log="one")
            asyncio.run(wait_ready(ring))
            expected = asyncio.run(texts(ring, None, PROMPTS))
            end(one)
        for number in (0, 1):
            ring.start_replica(number, "-tp", "2" if is_long else "1")
        asyncio.run(wait_ready(ring))
        found = asyncio.run(texts(ring, None, PROMPTS))
        assert expected in (None, found)
        [killed] = [pid for pid, name in family(ring.hosts[1].pid).items() if name == "gpu_worker 1"]
        assert asyncio.run(texts(ring, lambda: os.kill(killed, signal.SIGKILL), PROMPTS)) == found
        assert "replica 1 of 2 has ended; all replicas end" in ring.log(0)
        ranks = [pid for host in (0, 1) for pid in family(ring.hosts[host].pid)]
        for process in ring.hosts.values():
            process.kill()
            process.wait()
        wait_gone(ranks)


class Namespaces:
    """Two network namespaces with a cable between them."""

    def __init__(self) -> None:
        self.names = [f"by{os.getpid()}{end}" for end in "ab"]
        self.addresses = ["10.77.0.1", "10.77.0.2"]
        self.within = [["ip", "netns", "exec", name] for name in self.names]

    def make(self) -> str:
        """Returns why there are none; empty: there are."""
        (first, second), found = self.names, None
        for name in self.names:
            found = found or ip("netns", "add", name)
        found = found or ip("link", "add", first, "netns", first, "type", "veth", "peer", second, "netns", second)
        for name, address in zip(self.names, self.addresses, strict=True):
            found = found or ip("-n", name, "address", "add", f"{address}/24", "dev", name)
            for device in ("lo", name):
                found = found or ip("-n", name, "link", "set", device, "up")
        return found or ""

    def set_cable(self, state: str) -> None:
        """state: up or down."""
        assert not ip("-n", self.names[0], "link", "set", self.names[0], state)

    def remove(self) -> None:
        for name in self.names:
            ip("netns", "del", name)


def ip(*words: str) -> str:
    """Returns the error of a command, or nothing."""
    try:
        done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    except FileNotFoundError as e:
        return str(e)
    return done.stderr.strip() or ("" if done.returncode == 0 else f"exit code {done.returncode}")


@pytest.fixture
def namespaces() -> Iterator[Namespaces]:
    made = Namespaces()
    try:
        if missing := made.make():
            pytest.skip(
                f"NOT TESTED: ranks in two network namespaces, a partition: this user cannot make any: {missing}"
            )
        yield made
    finally:
        made.remove()


async def texts_in_a_partition(ring: HostsRing, namespaces: Namespaces) -> list[str]:
    is_cut = asyncio.Event()

    def cut() -> None:
        namespaces.set_cable("down")
        is_cut.set()

    reading = asyncio.create_task(texts(ring, cut))
    await is_cut.wait()
    await asyncio.sleep(PARTITION_S)
    assert not reading.done()
    namespaces.set_cable("up")
    return await reading


def test_a_partition_and_a_stopped_rank_change_no_text(
    tmp_path: Path, namespaces: Namespaces, expected: list[str]
) -> None:
    ring = HostsRing(tmp_path, namespaces.addresses, namespaces.within)
    with ring.stack:
        ring.start_services()
        for host in (0, 1):
            ring.start_host(host, "-tp", "2")
        asyncio.run(wait_ready(ring))
        assert asyncio.run(texts_in_a_partition(ring, namespaces)) == expected
        stopped = ring.rank(1, "rank 1")
        assert asyncio.run(texts(ring, lambda: os.kill(stopped, signal.SIGSTOP))) == expected
        assert ring.log(0).count("all ranks end") >= 2


def end_codes(bus: BusConfig, folder: Path, *hosts: tuple[str, ...]) -> list[tuple[int, str]]:
    """Runs a group's hosts until all end. Returns their exit codes and what they print."""
    names = "--message-bus", bus.registry, "--curve-keys", str(Path(bus.curve_public).parent)
    made = HostsRing(folder, ("127.0.0.1",), ((),), bus=names)
    with made.stack:
        found = [
            made.run(0, "gpu-worker", *MODEL, "-tp", "2", "--nnodes", "2", *flags, log=f"host {i}")
            for i, flags in enumerate(hosts)
        ]
        codes = [process.wait(60) for process in found]
        return [(code, made.log(i).strip()) for i, code in enumerate(codes)]


def test_hosts_that_do_not_fit_end_with_one_line(tmp_path: Path) -> None:
    bus = tcp_bus(tmp_path / "keys")
    own = ("--bind", "tcp://127.0.0.1")
    other = ("--bind", "tcp://127.0.0.2", "--node-rank", "1")
    alone = ("--rank-timeout", "1", "--name")
    with registry(bus):
        leader, follower, *lonely = end_codes(
            bus, tmp_path, own, (*other, "--seed", "7"), (*own, *alone, "first"), (*other, *alone, "second")
        )
    for code, line in (leader, follower):
        assert code == 2 and line.count("\n") == 0, line
        assert "has other flags than the leader: seed 7, the leader's 0" in line
    for (code, line), said in zip(
        lonely,
        ("no ranks of --node-rank 1 within 1 s (--rank-timeout)", "no leader (--node-rank 0) of the group second at "),
        strict=True,
    ):
        assert code == 3 and line.count("\n") == 0 and said in line, line
