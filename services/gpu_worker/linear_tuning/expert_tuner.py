"""Measures the fastest tile sizes of the products of a mixture's experts. Imports Triton: for GPUs only."""

import logging
from collections.abc import Generator, Mapping, Sequence

import torch
from torch import Tensor
from triton.errors import TritonError

from blockyard.services.gpu_worker.layers.moe.expert_configs import ExpertConfig, ExpertShape, candidates
from blockyard.services.gpu_worker.layers.moe.grouped_experts import GroupedExperts
from blockyard.services.gpu_worker.linear_tuning.timing import replay_seconds

log = logging.getLogger(__name__)

WEIGHT_BYTES = 400 << 20  # of different weights in one measurement; several times the L2 cache
DEVICE_TYPE = "cuda"
MARGIN = 0.98  # a config replaces the first candidate below this share of its time; a smaller gain is noise


class ExpertTuner:
    """Owns the configs of all mixtures of one model, by shape and number of rows."""

    def __init__(self, experts: Sequence[GroupedExperts]) -> None:
        """experts: of the model's layers. In host memory they keep the first candidates: the host link is the limit."""
        groups: dict[ExpertShape, list[GroupedExperts]] = {}
        for one in experts:
            if one.weight().device.type == DEVICE_TYPE:
                groups.setdefault(one.shape, []).append(one)
        self._groups = groups
        self.shapes = sorted(groups)

    def launch_candidates(self, rows: int) -> None:
        """Launches all candidates once, so that a `KernelCompiler` can record them."""
        for shape in self.shapes:
            layer = self._groups[shape][0]
            for config in candidates(shape, rows):
                try:
                    _forward(layer, *_inputs(layer, rows), config)
                except TritonError as e:  # too little shared memory, or this Triton version cannot compile it
                    log.debug("%s: %s", config, e)

    def measuring(self, rows: int) -> Generator[None, None, list[ExpertConfig]]:
        """Returns the fastest config of each shape, as a generator that yields after each timing."""
        picked = []
        for shape in self.shapes:
            times: dict[ExpertConfig, float] = {}
            for config in candidates(shape, rows):
                times[config] = self.seconds(config, shape, rows)
                yield
            picked.append(fastest(times))
        return picked

    def seconds(self, config: ExpertConfig, shape: ExpertShape, rows: int) -> float:
        """Seconds of the experts of a layer with even routing; infinite if the config cannot be compiled."""
        layers = self._groups[shape]
        some = layers[: max(-(-WEIGHT_BYTES // layers[0].weight().nbytes), 2)]
        inputs = _inputs(layers[0], rows)

        def step() -> None:
            for layer in some:
                _forward(layer, *inputs, config)

        try:
            step()
        except TritonError as e:
            log.debug("%s: %s", config, e)
            return float("inf")
        return replay_seconds(step) / len(some)

    def install(self, configs: Mapping[int, Sequence[ExpertConfig]]) -> None:
        """configs: by number of rows, one for each of `shapes`."""
        for i, shape in enumerate(self.shapes):
            own = {rows: some[i] for rows, some in configs.items()}
            for layer in self._groups[shape]:
                layer.use(own)


def fastest(times: Mapping[ExpertConfig, float]) -> ExpertConfig:
    """The fastest config if it beats the first one by MARGIN, else the first one."""
    first = next(iter(times))
    quickest = min(times, key=lambda config: times[config])
    return quickest if times[quickest] < MARGIN * times[first] else first


def _inputs(layer: GroupedExperts, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random rows, and for each the experts of even routing with equal weights."""
    shape, device = layer.shape, layer.weight().device
    random = torch.Generator(device).manual_seed(rows)
    x = torch.randn(rows, shape.hidden, generator=random, device=device).to(layer.weight().dtype)
    scores = torch.rand(rows, shape.num_experts, generator=random, device=device)
    experts = scores.topk(shape.top_k).indices.int()
    return x, experts, torch.full((rows, shape.top_k), 1 / shape.top_k, device=device)


def _forward(layer: GroupedExperts, x: Tensor, experts: Tensor, weights: Tensor, config: ExpertConfig) -> None:
    layer.forward_with(config, x, experts, weights)
