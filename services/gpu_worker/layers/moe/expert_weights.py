"""The weights of a layer's experts, where checkpoints have them, and their products."""

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from blockyard.kernels.layers.rms_norm import RMSNorm
from blockyard.kernels.moe.routing import Routing
from blockyard.services.gpu_worker.layers.linear import Linear, LinearLayers, make_spec
from blockyard.services.gpu_worker.layers.moe.expert_matrices import ExpertMatrix
from blockyard.services.gpu_worker.layers.moe.expert_places import ExpertPlaces
from blockyard.services.gpu_worker.loading.expert_loads import LayerLoad
from blockyard.services.gpu_worker.loading.linear_spec import ExpertSpec, MatrixPart, Rows, Split, part
from blockyard.services.gpu_worker.parallel.rank_group import RankGroup
from blockyard.services.gpu_worker.parallel.replicas import ExpertExchange
from blockyard.services.gpu_worker.parallel.shares import over_replicas
from blockyard.services.gpu_worker.quantization.method import ExpertLinear, ExpertMethod
from blockyard.shared.errors import ConfigError

STACK_SUFFIXES = ("", "_bias")  # transformers' own


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertWeights:
    gate_up: ExpertMethod  # hidden -> 2 * inner, the gate first
    down: ExpertMethod  # inner -> hidden
    device: torch.device  # that multiplies
    load: LayerLoad | None = None  # counts how often each expert is chosen
    specs: tuple[ExpertSpec, ExpertSpec] | None = None  # of gate_up and down; None: they have no names
    is_partial: bool = False  # the sum of a row's experts is still to be added to other ranks' sums
    ranks: RankGroup | None = None  # that add them; None: one rank, or the model is only declared
    places: ExpertPlaces | None = None  # of experts that ranks have whole; None: each has a share of every expert
    exchange: ExpertExchange | None = None  # with ranks of other replicas, which have others; None: there are none

    def num_own(self, routing: Routing) -> int:
        return routing.num_experts if self.places is None else self.places.num_own

    def tensors(self) -> list[Tensor]:
        return [*self.gate_up.tensors().values(), *self.down.tensors().values()]


class ExpertProducts(Protocol):
    """The products of the experts on one type of device."""

    def linears(self) -> list[Linear]:
        """The matrices that are linear layers of their own."""

    def matrices(self) -> list[ExpertMatrix]:
        """The products that adapters change for all experts at once; none where each expert has linear layers."""

    def tensors(self) -> list[Tensor]:
        """All tensors of the weights."""

    @property
    def places(self) -> ExpertPlaces | None:
        """See `ExpertWeights`."""

    def weights_at(self, place: int) -> list[ExpertLinear]:
        """The weights of the expert at a place of this rank: `gate_up` and `down`."""

    def numbers(self) -> list[Tensor]:
        """See `ExpertMethod`."""

    def choose(self, logits: Tensor, bias: Tensor | None, factors: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Chooses experts: see `choose_experts`. Returns what `forward` takes, which may be places of this rank."""

    def fuses_norm(self, rows: int) -> bool:
        """Whether `forward` of so many rows can normalise x as it is read."""

    def forward(
        self,
        x: Tensor,
        experts: Tensor,
        weights: Tensor,
        shared: Tensor | None,
        batch_invariant: bool = False,
        residual: Tensor | None = None,
        norm: RMSNorm | None = None,
    ) -> Tensor | None:
        """x [rows, hidden], experts and weights of `choose` [rows, top_k] -> the sum of a row's experts and `shared`.

        batch_invariant: a row has the same bits whatever the number of rows. residual [rows, hidden]: the sum may be
        added to it in place, and then None is returned; or the addends are, [rows, top_k, hidden]. norm: of x, only if
        `fuses_norm`.
        """


def separate_experts(
    layers: LinearLayers,
    prefix: str,
    num_experts: int,
    hidden: int,
    inner: int,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    bias: bool = False,
) -> ExpertWeights:
    """Weights that the checkpoint has one by one: `prefix`.0.gate_proj.weight and so on."""
    gate, up, down = (f"{prefix}.{{}}.{name}" for name in names)
    matrices = (
        make_spec([part(gate, inner), part(up, inner)], hidden, split=Split.OUTPUTS, bias=bias),
        make_spec([part(down, hidden)], inner, split=Split.INPUTS, bias=bias),
    )
    return _make(layers, *(ExpertSpec(num_experts=num_experts, matrix=one) for one in matrices))


def stacked_experts(
    layers: LinearLayers,
    gate_up_name: str,
    down_name: str,
    num_experts: int,
    hidden: int,
    inner: int,
    *,
    suffixes: tuple[str, str] = STACK_SUFFIXES,
    transposed: bool = False,
    in_pairs: bool = False,
    bias: bool = False,
) -> ExpertWeights:
    """Weights of which the checkpoint has two: [experts, 2 * inner, hidden] and [experts, hidden, inner].

    suffixes: of names. transposed: the checkpoint has them as [experts, hidden, 2 * inner] and
    [experts, inner, hidden]. in_pairs: it has an output of gate and one of up in turn. Quantized checkpoints may have
    them one by one instead: llm-compressor makes linear layers of experts.
    """
    prefix = gate_up_name.rpartition(".")[0]
    if layers.table.headers.has_part(f"{prefix}.0"):
        return separate_experts(layers, prefix, num_experts, hidden, inner, bias=bias)
    both = MatrixPart(name=gate_up_name, rows=(Rows(inner, inner),) * 2, interleaved=in_pairs)
    matrices = (
        make_spec([both], hidden, split=Split.OUTPUTS, transposed=transposed, bias=bias),
        make_spec([part(down_name, hidden)], inner, split=Split.INPUTS, transposed=transposed, bias=bias),
    )
    return _make(
        layers,
        *(ExpertSpec(num_experts=num_experts, matrix=one, stacked=True, suffixes=suffixes) for one in matrices),
    )


def _make(layers: LinearLayers, gate_up: ExpertSpec, down: ExpertSpec) -> ExpertWeights:
    table, places = layers.table, None
    shard = over_replicas(table.shard, table.replica)
    if table.spreads_experts and shard.size > 1:
        if gate_up.num_experts < shard.size:
            raise ConfigError(
                f"--enable-expert-parallel: {gate_up.num_experts} experts cannot be on {shard.size} ranks"
            )
        places = ExpertPlaces(gate_up.num_experts, shard, table.device, counts=table.moves_experts)
        own = places.first
        gate_up, down = (replace(one, own=own, matrix=replace(one.matrix, split=Split.NONE)) for one in (gate_up, down))
    return ExpertWeights(
        gate_up=layers.experts(gate_up),
        down=layers.experts(down),
        specs=(gate_up, down),
        device=table.device,
        load=table.expert_load(gate_up.num_experts) if places is None else None,
        is_partial=shard.size > 1,
        ranks=table.ranks,
        places=places,
        exchange=table.exchange,
    )
