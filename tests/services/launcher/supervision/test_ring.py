"""A ring of real processes that join a real registry and otherwise do nothing."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
from rings import STAND_IN, Recorder, deployment, stand_in

from blockyard.services.launcher.supervision.child import MakeCommand
from blockyard.services.launcher.supervision.ring import Ring
from blockyard.services.launcher.supervision.supervisor import StartFailed

FLAGS = ("--api-gateways", "2")
NAMES = {
    "api_gateway 0",
    "api_gateway 1",
    "detokenizer 0",
    "scheduler",
    "tokenizer_pool 0",
    "gpu_worker",
    "message_bus",
}


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="by-") as path:  # short: ipc paths are limited
        yield Path(path)


@asynccontextmanager
async def running(folder: Path, display: Recorder, *flags: str, command: MakeCommand = stand_in) -> AsyncIterator[Ring]:
    ring = Ring(deployment(folder, *FLAGS, *flags), folder, display, command)
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        tasks.create_task(ring.run(drain_s=10.0))
        await ring.ready.wait()
        yield ring
        ring.stop()


def pids(ring: Ring) -> dict[str, int]:
    return {child.spec.name: child.pid for child in ring.supervisor.children if child.pid}


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_ring_starts_is_told_and_drains_gateways_first(folder: Path) -> None:
    display = Recorder()

    async def scenario() -> dict[str, int]:
        async with running(folder, display) as ring:
            return pids(ring)

    found = asyncio.run(scenario())
    assert found.keys() == NAMES
    assert {*display.were_ready} == NAMES
    assert display.were_ready[0] == "message_bus"
    assert ("scheduler", "warming up", 0.5) in display.phases
    assert "  gpu_worker: one note" in display.said
    order = (folder / "order").read_text().split("\n")[:-1]
    assert {*order[:2]} == {"api_gateway 0", "api_gateway 1"}
    assert {*order[2:]} == NAMES - {*order[:2], "message_bus"}
    assert not any(alive(pid) for pid in found.values())


def test_a_killed_child_is_started_again(folder: Path) -> None:
    display = Recorder()

    async def scenario() -> tuple[int, int]:
        async with running(folder, display) as ring:
            before = pids(ring)["detokenizer 0"]
            os.kill(before, signal.SIGKILL)
            while "detokenizer 0 is ready again" not in display.said:
                await asyncio.sleep(0.02)
            return before, pids(ring)["detokenizer 0"]

    before, after = asyncio.run(scenario())
    assert before != after


def test_hung_children_are_killed_and_started_again(folder: Path) -> None:
    """Every role at once, then the registry: only the launcher detects its silence."""
    display = Recorder()

    async def stop_and_wait(ring: Ring, names: set[str]) -> None:
        before = pids(ring)
        for name in names:
            os.kill(before[name], signal.SIGSTOP)
        while any(pids(ring).get(name, before[name]) == before[name] for name in names):
            await asyncio.sleep(0.05)
        assert {name for name in NAMES if pids(ring).get(name) != before[name]} == names
        assert not any(alive(before[name]) for name in names)

    async def scenario() -> None:
        async with running(folder, display, "--hung-timeout", "1") as ring:
            members = NAMES - {"message_bus"}
            await stop_and_wait(ring, members)
            while not {f"{name} is ready again" for name in members} <= {*display.said}:
                await asyncio.sleep(0.05)
            await stop_and_wait(ring, {"message_bus"})

    asyncio.run(scenario())


def test_a_loop_that_stands_still_is_killed_though_its_process_runs(folder: Path) -> None:
    display = Recorder()

    async def scenario() -> set[str]:
        async with running(folder, display, "--hung-timeout", "1") as ring:
            before = pids(ring)
            os.kill(before["detokenizer 0"], signal.SIGUSR1)
            while "detokenizer 0 is ready again" not in display.said:
                await asyncio.sleep(0.05)
            return {name for name, pid in pids(ring).items() if pid != before[name]}

    assert asyncio.run(scenario()) == {"detokenizer 0"}


def test_a_ring_survives_a_while_in_which_no_process_can_start(folder: Path) -> None:
    display = Recorder()
    failures: list[str] = []

    def command(service: str, settings: Path) -> list[str]:
        if failures:
            return [failures.pop()]
        return stand_in(service, settings)

    async def scenario() -> tuple[dict[str, int], dict[str, int]]:
        async with running(folder, display, command=command) as ring:
            before = pids(ring)
            sockets = len([path for path in folder.iterdir() if path.is_socket()])
            failures.extend(["/no/such/python", str(folder)])  # ENOENT, then EACCES
            os.kill(before["detokenizer 0"], signal.SIGKILL)
            while "detokenizer 0 is ready again" not in display.said:
                await asyncio.sleep(0.02)
            assert len([path for path in folder.iterdir() if path.is_socket()]) == sockets
            return before, pids(ring)

    before, after = asyncio.run(scenario())
    assert not failures
    assert {name for name in NAMES if before[name] != after[name]} == {"detokenizer 0"}


def test_a_child_that_cannot_be_started_at_first_is_one_line(folder: Path) -> None:
    def command(service: str, settings: Path) -> list[str]:
        return ["/no/such/python"] if service == "scheduler" else stand_in(service, settings)

    ring = Ring(deployment(folder), folder, Recorder(), command)
    said = (
        r"^scheduler could not be started 3 times before it was ready \(No such file or directory: /no/such/python\)$"
    )
    with pytest.raises(StartFailed, match=said):
        asyncio.run(ring.run(10.0))


def test_a_second_signal_kills(folder: Path) -> None:
    async def scenario() -> dict[str, int]:
        async with running(folder, Recorder()) as ring:
            found = pids(ring)
            os.kill(found["api_gateway 0"], signal.SIGSTOP)  # it cannot handle SIGTERM
            ring.stop()
            await asyncio.sleep(0.1)
            ring.kill()
            return found

    began = time.monotonic()
    found = asyncio.run(scenario())
    assert time.monotonic() - began < 8  # a drain would have waited 15 s for the gateway
    assert not any(alive(pid) for pid in found.values())


def test_a_child_that_cannot_start_ends_the_ring_with_its_own_error(folder: Path) -> None:
    said = "import pathlib, sys; pathlib.Path(sys.argv[1]).with_suffix('.error').write_text('no weights\\nin /m')"

    def command(service: str, settings: Path) -> list[str]:
        if service == "gpu_worker":
            return [sys.executable, "-c", f"{said}; sys.exit(3)", str(settings)]
        return stand_in(service, settings)

    ring = Ring(deployment(folder), folder, Recorder(), command)
    with pytest.raises(StartFailed, match=r"^gpu_worker: no weights in /m$") as failure:
        asyncio.run(ring.run(10.0))
    assert failure.value.exit_code == 3
    assert pids(ring) == {}


def test_a_child_that_crashes_at_every_start_is_given_up(folder: Path) -> None:
    def command(service: str, settings: Path) -> list[str]:
        if service == "scheduler":
            return [sys.executable, "-c", "import os; os.abort()"]
        return stand_in(service, settings)

    ring = Ring(deployment(folder), folder, Recorder(), command)
    with pytest.raises(StartFailed, match=r"^scheduler ended 3 times before it was ready \(killed by SIGABRT\)$"):
        asyncio.run(ring.run(10.0))


LAUNCHER = """
import asyncio, sys
from pathlib import Path
sys.path.append({tests!r})
from rings import Recorder, deployment, stand_in
from blockyard.services.launcher.supervision.child import MakeCommand
from blockyard.services.launcher.supervision.ring import Ring

async def main():
    folder = Path({folder!r})
    ring = Ring(deployment(folder, *{flags!r}), folder, Recorder(), stand_in)
    task = asyncio.create_task(ring.run(10.0))
    await ring.ready.wait()
    print(*(child.pid for child in ring.supervisor.children), flush=True)
    await task

asyncio.run(main())
"""


@contextmanager
def launched(folder: Path, *flags: str) -> Iterator[tuple["subprocess.Popen[str]", list[int]]]:
    """A launcher in a process of its own, and the process ids of its children."""
    program = LAUNCHER.format(tests=str(STAND_IN.parent), folder=str(folder), flags=flags)
    paths = os.pathsep.join([str(STAND_IN.parents[3] / ".src"), os.environ.get("PYTHONPATH", "")])
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": paths}
    ) as launcher:
        assert launcher.stdout is not None
        children = [int(pid) for pid in launcher.stdout.readline().split()]
        assert len(children) == 6
        assert all(alive(pid) for pid in children)
        try:
            yield launcher, children
        finally:
            launcher.kill()


@pytest.mark.parametrize("with_children", [False, True])
def test_a_launcher_that_stood_still_kills_nobody(folder: Path, with_children: bool) -> None:
    """Alone, or with all its children as in a paused container, where the children wake up a little later."""
    with launched(folder, "--hung-timeout", "1") as (launcher, children):
        stopped = [launcher.pid, *(children if with_children else [])]
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(3)
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.05)
        time.sleep(2.5)
        assert all(alive(pid) for pid in children)


def test_children_die_with_a_killed_launcher(folder: Path) -> None:
    with launched(folder) as (_, children):
        pass
    deadline = time.monotonic() + 5
    while any(alive(pid) for pid in children) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(alive(pid) for pid in children)
