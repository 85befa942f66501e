"""A leader of several ranks in the process of a test, and its followers."""

import threading
import weakref
from pathlib import Path

from equality import BLOCK_BYTES, FEW, MAX_MODEL_LEN
from tiny_models import settings

from blockyard.services.gpu_worker import engine
from blockyard.services.gpu_worker.encoders.encoder_runner import EncoderRunner
from blockyard.services.gpu_worker.interfaces import Report
from blockyard.services.gpu_worker.ranks.leader_team import LeaderTeam
from blockyard.services.gpu_worker.runner import Runner
from blockyard.shared.config.services.worker import WorkerConfig
from blockyard.shared.errors import BlockyardError


def config(folder: Path, size: int = 2, num_stages: int = 1, **fields: object) -> WorkerConfig:
    host_gib = 300 * BLOCK_BYTES / 2**30 / size
    few = {"num_gpu_blocks_override": FEW, "swap_space_gib": host_gib, "max_model_len": MAX_MODEL_LEN}
    return settings(folder, tensor_parallel_size=size, pipeline_parallel_size=num_stages, **few, **fields)


def report(phase: str, progress: float, notes: list[str]) -> None:
    pass


class Group:
    """A leader in this process, and its followers."""

    def __init__(self, config: WorkerConfig, folder: Path, on_report: Report = report) -> None:
        self.ended, self.errors = threading.Event(), list[BlockyardError]()
        self._config, self._on_report = config, on_report
        self.team = LeaderTeam(config, folder, self._end)
        self.team.start({})
        self._last: weakref.ref[Runner | EncoderRunner] | None = None

    def start(self) -> Runner:
        runner = self.start_any()
        assert isinstance(runner, Runner)
        return runner

    def start_any(self) -> Runner | EncoderRunner:
        runner = engine.start(self._config, self._on_report, team=self.team)
        self.team.serve()
        self._last = weakref.ref(runner)  # a deep sleep drops it
        return runner

    @property
    def runner(self) -> Runner | EncoderRunner:
        """That has started last."""
        runner = None if self._last is None else self._last()
        assert runner is not None
        return runner

    def _end(self, error: BlockyardError) -> None:
        self.errors.append(error)
        self.ended.set()
