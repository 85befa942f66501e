"""A real fork server with its text workers, and the service's side on the test's event loop."""

import asyncio
import contextlib
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from blockyard.services.tokenizer_pool import fork_server
from blockyard.services.tokenizer_pool.job_limits import JobLimits
from blockyard.services.tokenizer_pool.text_process import TextProcess
from blockyard.services.tokenizer_pool.worker_frames import Answer, Work
from blockyard.shared.config.services.process import BusConfig, ProcessConfig
from blockyard.shared.config.services.tokenizer import TokenizerConfig
from blockyard.shared.errors import BlockyardError

LIMIT_S = 60.0
QUICK = JobLimits(render_cpu_s=0.2, encode_cpu_s=0.2)


class TextRig:
    def __init__(self, runner: asyncio.Runner, process: TextProcess) -> None:
        self._runner, self.process = runner, process
        self.answers: list[tuple[int, Answer]] = []
        serving = process.run(lambda peer, answer: self.answers.append((peer, answer)))
        self.serving = runner.get_loop().create_task(serving)

    def run(self, work: Awaitable[None]) -> None:
        self._runner.run(_ended(work))

    def ask(self, *works: Work) -> list[Answer]:
        """Returns the answers in order of arrival."""
        self.answers.clear()
        for work in works:
            self.run(self._submit(work))
        return self.wait(len(works))

    def wait(self, number: int) -> list[Answer]:
        """Returns the first `number` answers."""
        self.run(asyncio.wait_for(self._all(number), LIMIT_S))
        return [answer for _, answer in self.answers]

    def settle(self) -> int:
        """Waits until a worker is idle, and returns its process id."""
        self.ask()
        self.run(asyncio.sleep(0.05))
        assert self.process.worker_pid is not None
        return self.process.worker_pid

    async def _submit(self, work: Work) -> None:
        self.process.submit(1, work)

    async def _all(self, number: int) -> None:
        while len(self.answers) < number or self.process.worker_pid is None:
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
    control = fork_server.start(text_config(folder, **settings), limits)
    with asyncio.Runner() as runner:
        process = TextProcess(control, limits)
        runner.run(process.load())
        rig = TextRig(runner, process)
        yield rig
        rig.serving.cancel()
        with contextlib.suppress(asyncio.CancelledError, BlockyardError):
            rig.run(rig.serving)


async def _ended(work: Awaitable[None]) -> None:
    await work
