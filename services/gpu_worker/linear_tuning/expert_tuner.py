"""Measures the fastest tile sizes of the products of a mixture's experts. Imports Triton: for GPUs only."""

import logging
from collections.abc import Generator, Mapping, Sequence

import torch
from torch import Tensor
from triton.errors import TritonError

from blockyard.services.gpu_worker.layers.moe.expert_configs import ExpertConfig, ExpertShape, candidates
from blockyard.services.gpu_worker.layers.moe.grouped_experts import GroupedExperts
from blockyard.services.gpu_worker.linear_tuning.kernel_configs import fastest_over
from blockyard.services.gpu_worker.linear_tuning.timing import WEIGHT_BYTES, replay_seconds

log = logging.getLogger(__name__)


class ExpertTuner:
    """Owns the configs of all mixtures of one model, by shape and number of rows."""

    def __init__(self, experts: Sequence[GroupedExperts]) -> None:
        """experts: of the model's layers. In host memory they keep the first candidates: the host link is the limit."""
        groups: dict[ExpertShape, list[GroupedExperts]] = {}
        for one in experts:
            if one.is_on_device:
                groups.setdefault(one.shape, []).append(one)
        self._groups = groups
        self.shapes = sorted(groups)

    def launch_candidates(self, rows: int) -> None:
        """Launches all candidates once, so that a `KernelCompiler` can record them."""
        for shape in self.shapes:
            layer = self._groups[shape][0]
            for config in candidates(shape, rows):
                try:
                    layer.forward_with(config, *_inputs(layer, rows))
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
                layer.forward_with(config, *inputs)

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
    """The fastest config if it clearly beats the first one, else the first one."""
    return fastest_over(next(iter(times)), times)


def _inputs(layer: GroupedExperts, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random rows, and for each the experts of even routing with equal weights."""
    shape, device = layer.shape, layer.weight().device
    random = torch.Generator(device).manual_seed(rows)
    x = torch.randn(rows, shape.hidden, generator=random, device=device).to(layer.weight().dtype)
    scores = torch.rand(rows, shape.num_experts, generator=random, device=device)
    experts = scores.topk(shape.top_k).indices.int()
    return x, experts, torch.full((rows, shape.top_k), 1 / shape.top_k, device=device)
