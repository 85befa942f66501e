"""Measures the fastest tile sizes of the products of a mixture's experts. Imports Triton: for GPUs only."""

import logging
import math
from collections.abc import Callable, Generator, Mapping, Sequence

import torch
from torch import Tensor
from triton.errors import TritonError

from blockyard.kernels.layers.add_rms_norm import add_rms_norm
from blockyard.services.gpu_worker.layers.moe.expert_configs import ExpertConfig, ExpertShape, candidates
from blockyard.services.gpu_worker.layers.moe.grouped_experts import GroupedExperts
from blockyard.services.gpu_worker.linear_tuning.kernel_configs import fastest_over
from blockyard.services.gpu_worker.linear_tuning.timing import WEIGHT_BYTES, replay_seconds

log = logging.getLogger(__name__)

EPS = 1e-6  # of the norm behind the experts


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
            layers = self._groups[shape][:1]
            for config in candidates(shape, rows):
                try:
                    _step(config, layers, _inputs(layers[0], rows))()
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
        """Seconds of the experts of a layer with even routing, of the sum with the residual and of the next norm;
        infinite if the config cannot be compiled."""
        layers = self._groups[shape]
        share = 1 - (1 - shape.top_k / shape.num_experts) ** rows  # of weights that are read on average
        read_bytes = share * layers[0].size_bytes
        some = layers[: max(math.ceil(WEIGHT_BYTES / max(read_bytes, 1)), 2)]
        step = _step(config, some, _inputs(layers[0], rows))
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
    shape, device = layer.shape, layer.device
    random = torch.Generator(device).manual_seed(rows)
    x = torch.randn(rows, shape.hidden, generator=random, device=device).to(layer.dtype)
    scores = torch.rand(rows, shape.num_experts, generator=random, device=device)
    experts = scores.topk(shape.top_k).indices.int()
    return x, experts, torch.full((rows, shape.top_k), 1 / shape.top_k, device=device)


def _step(
    config: ExpertConfig, layers: Sequence[GroupedExperts], inputs: tuple[Tensor, Tensor, Tensor]
) -> Callable[[], None]:
    """The experts of these layers with their sums and the norms behind: kernels differ in how much of a sum they leave
    to the norm."""
    residual, norm_weight = torch.zeros_like(inputs[0]), torch.ones_like(inputs[0][0])

    def step() -> None:
        for layer in layers:
            add_rms_norm(residual, layer.forward_with(config, *inputs, residual), norm_weight, EPS)

    return step
