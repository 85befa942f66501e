"""A real fork server with its text workers, and the service's side on the test's event loop."""

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from blockyard.services.tokenizer_pool.workers.fork_server import ServerSettings
from blockyard.services.tokenizer_pool.workers.job_limits import NUM_WORKERS, JobLimits
from blockyard.services.tokenizer_pool.workers.job_workers import JobWorkers
from blockyard.services.tokenizer_pool.workers.worker_frames import Answer, Work
from blockyard.shared.config.services.process import BusConfig, ProcessConfig
from blockyard.shared.config.services.tokenizer import TokenizerConfig
from blockyard.shared.errors import BlockyardError

TEXT_MODULE = "blockyard.services.tokenizer_pool.text_worker"
LIMIT_S = 60.0
QUICK = JobLimits(render_cpu_s=0.2, encode_cpu_s=0.2)


class TextRig:
    def __init__(self, runner: asyncio.Runner, workers: JobWorkers) -> None:
        self._runner, self.workers = runner, workers
        self.answers: list[tuple[int, Answer]] = []
        serving = workers.run(lambda peer, answer: self.answers.append((peer, answer)))
        self.serving = runner.get_loop().create_task(serving)

    def run(self, work: Awaitable[None]) -> None:
        self._runner.run(_ended(work))

    def ask(self, *works: Work) -> list[Answer]:
        """Returns the answers in order of arrival."""
        self.answers.clear()
        for work in works:
            self.run(self.submit(work))
        return self.wait(len(works))

    def wait(self, number: int) -> list[Answer]:
        """Returns the first `number` answers."""
        self.run(asyncio.wait_for(self._all(number), LIMIT_S))
        return [answer for _, answer in self.answers]

    def settle(self) -> list[int]:
        """Waits until all workers are idle, and returns their process ids."""
        self.ask()
        self.run(asyncio.sleep(0.05))
        self.ask()
        return self.workers.worker_pids

    def server(self) -> int:
        """The process id of the fork server."""
        return parent_of(self.settle()[0])

    def until(self, is_so: Callable[[], bool]) -> None:
        async def wait() -> None:
            while not is_so():
                await asyncio.sleep(0.005)

        self.run(asyncio.wait_for(wait(), LIMIT_S))

    async def submit(self, work: Work) -> None:
        self.workers.submit(1, work)

    async def _all(self, number: int) -> None:
        while len(self.answers) < number or len(self.workers.worker_pids) < NUM_WORKERS:
            await asyncio.sleep(0.005)


def text_config(folder: Path = Path(), **settings: Any) -> TokenizerConfig:
    return TokenizerConfig(
        process=ProcessConfig(name="test", bus=BusConfig(registry="ipc:///nowhere", bind="ipc:///")),
        tokenizer_path=str(folder),
        served_model_names=["m"],
        **settings,
    )


@contextlib.contextmanager
def text_rig(folder: Path, tokenizer: Tokenizer, limits: JobLimits = QUICK, **settings: Any) -> Iterator[TextRig]:
    tokenizer.save(str(folder / "tokenizer.json"))
    with asyncio.Runner() as runner:
        settings_of_server = ServerSettings(config=text_config(folder, **settings), limits=limits)
        workers = runner.run(_started(settings_of_server))
        rig = TextRig(runner, workers)
        yield rig
        rig.serving.cancel()
        with contextlib.suppress(asyncio.CancelledError, BlockyardError):
            rig.run(rig.serving)


async def _ended(work: Awaitable[None]) -> None:
    await work


async def _started(settings: ServerSettings) -> JobWorkers:
    workers = JobWorkers(TEXT_MODULE, settings)
    await workers.load()
    return workers


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def children_with(text: str) -> list[int]:
    """The children of this process with this text in their command line, as a fork server has until it loads."""
    own = os.getpid()
    children = [int(pid) for task in Path(f"/proc/{own}/task").iterdir() for pid in _read(task / "children").split()]
    return [pid for pid in children if text in _read(Path(f"/proc/{pid}/cmdline"))]


def _read(path: Path) -> str:
    """The text of a file of a process; empty if it has ended."""
    try:
        return path.read_text()
    except OSError:
        return ""
