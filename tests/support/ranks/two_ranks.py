"""Two ranks with the steps of a GPU, its operations in plain torch: the follower is a thread."""

import threading
from collections.abc import Sequence
from pathlib import Path
from queue import SimpleQueue

import torch
from placed_adapters import KERNELS, finished, read_adapter
from rank_logits import CPU, connect, load, load_undivided
from reference_ops import ReferenceOps, run_ahead

from blockyard.services.gpu_worker.execution.cuda.follower_steps import DeviceFollowerSteps
from blockyard.services.gpu_worker.execution.cuda.pooled_attention import TritonChunkAttention
from blockyard.services.gpu_worker.execution.pooled_steps import PooledSteps
from blockyard.services.gpu_worker.execution.ranks.follower import Follower
from blockyard.services.gpu_worker.execution.ranks.leader import DeviceMirror, LeaderModel, LeaderPool
from blockyard.services.gpu_worker.host_link import SameMemory
from blockyard.services.gpu_worker.interfaces import StoredLayers
from blockyard.services.gpu_worker.kv.pool import KVPool
from blockyard.services.gpu_worker.lora.device.device_places import DevicePlaces
from blockyard.services.gpu_worker.lora.read_modules import AdapterLimits
from blockyard.services.gpu_worker.lora.targets import ModelTargets
from blockyard.services.gpu_worker.models.interface import Model
from blockyard.services.gpu_worker.parallel.commands import Command, DeviceForward, Followers
from blockyard.services.gpu_worker.parallel.team import RankGroups
from blockyard.services.gpu_worker.pooling.output import PoolingOutput
from blockyard.services.gpu_worker.runner import Runner
from blockyard.shared.messages import Geometry
from blockyard.shared.messages.base import Frame

CAPACITY = 16
LIMITS = AdapterLimits(dtype=torch.float32, max_rank=16, fully_sharded=True)


class TwoRanks:
    """A leader's runner, and a follower in a thread that does what comes."""

    def __init__(
        self,
        folder: Path,
        group: Path,
        geometry: Geometry,
        size: int,
        num_stages: int,
        adapters: Sequence[Path] = (),
        output: PoolingOutput | None = None,
    ) -> None:
        """adapters: in places 0, 1, ... of the device. output: of a model that pools; None: it generates."""
        self._adapters = adapters
        self._commands: SimpleQueue[Command | None] = SimpleQueue()
        self._folder, self._group, self._geometry = folder, group, geometry
        self._size, self._num_stages = size, num_stages
        self.problem: Exception | None = None
        self.forwards: list[DeviceForward] = []
        self.stored: list[Sequence[StoredLayers]] = []  # what the follower says behind each of them
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()
        ranks = connect(0, size, group, num_stages, runs_ahead=True)
        model, send = self._load(ranks), self.send
        pool = self._pool(model)
        pool.mirror = LeaderPool(send)
        self.runner = Runner(LeaderModel(model, ranks, send), pool, geometry, None, lambda runner: None, send=send)
        if output is None:
            mirror = DeviceMirror(send, ranks, SameMemory())
            run_ahead(self.runner, CAPACITY, records_layers=False, masks=False, mirror=mirror)
        else:
            attention = TritonChunkAttention(pool, SameMemory(), has_followers=True)
            runner = self.runner
            runner.use(PooledSteps(runner.model, pool, runner.batch, geometry, output, attention))

    def _load(self, ranks: RankGroups) -> Model:
        model = load(self._folder, ranks)
        if self._adapters:
            undivided = load_undivided(self._folder)
            places = DevicePlaces(model, len(self._adapters), LIMITS, KERNELS, CPU, SameMemory())
            targets = ModelTargets(model, undivided, fully_sharded=LIMITS.fully_sharded)
            for place, folder in enumerate(self._adapters):
                places.put(place, finished(places.prepare(read_adapter(folder, targets, LIMITS))))
        return model

    def send(self, frame: Frame, to: Followers = Followers.ALL) -> None:
        assert isinstance(frame, Command)
        if to is not Followers.LAST_STAGE or self._num_stages == 1:
            self._commands.put(frame)

    def _pool(self, model: Model) -> KVPool:
        return KVPool(model.shape, self._geometry.num_blocks, self._geometry.block_size, torch.float32, CPU)

    def _follow(self) -> None:
        try:
            ranks = connect(1, self._size, self._group, self._num_stages, runs_ahead=True)
            model = self._load(ranks)
            pool = self._pool(model)
            steps = DeviceFollowerSteps(model, pool, ranks, self._geometry, ReferenceOps())
            follower = Follower(model, pool, None, steps)
            while (command := self._commands.get()) is not None:
                if isinstance(command, DeviceForward):
                    self.forwards.append(command)
                follower.do(command)
                if isinstance(command, DeviceForward):
                    self.stored.append(follower.stored)
        except Exception as e:
            self.problem = e
            raise

    def close(self) -> None:
        self._commands.put(None)
        self._thread.join(10)
        assert self.problem is None
