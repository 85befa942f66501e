"""The attention sublayer: QKV projection, attention over the paged KV cache, output projection."""

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from blockyard.kernels.attention.score_rules import ScoreRules
from blockyard.kernels.layers.apply_rope import interleave_pairs
from blockyard.kernels.layers.rms_norm import RMSNorm
from blockyard.services.gpu_worker.layers.fused_ops import FusedOps, ops_of
from blockyard.services.gpu_worker.layers.linear import Linear, LinearLayers
from blockyard.services.gpu_worker.layers.norm import DividedQKNorm, MakeQKNorm, Norm, SeparateQKNorm
from blockyard.services.gpu_worker.layers.rotary import Rotation
from blockyard.services.gpu_worker.loading.linear_spec import Arrange, MatrixPart, Rows, Split, part
from blockyard.services.gpu_worker.parallel.shares import Shard
from blockyard.services.gpu_worker.quantization.method import Fusion
from blockyard.services.gpu_worker.step import Attend
from blockyard.shared.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """The attention sizes of one layer. Layers of a model may differ."""

    num_heads: int
    kv_heads: int
    head_dim: int  # of q and K
    rules: ScoreRules  # without `kv_scales`, which the cache has: see `LayerKV`
    latent_dim: int | None = None  # V is the first so many numbers of K, and is not stored; None: V is as large as K
    plain_dim: int | None = None  # of a latent layer, in a head of q and K before absorption: numbers not rotated
    value_dim: int | None = None  # of a latent layer: a head of V that is made of a latent
    first_kv_head: int = 0  # number in the model of the first one here
    model_kv_heads: int | None = None  # that all ranks have together; None: this rank has them

    @property
    def kept(self) -> tuple[int, int, int]:
        """What the KV cache keeps of a token: planes (K and V, or K alone), heads, numbers of a head."""
        return (2 if self.latent_dim is None else 1, self.kv_heads, self.head_dim)

    def share(self, shard: Shard) -> "AttentionShape":
        """Returns the sizes of a rank. Raises ConfigError for more ranks than query heads."""
        if shard.size == 1:
            return self
        if shard.size > self.num_heads:
            raise ConfigError(
                f"--tensor-parallel-size {shard.size} is more than the {self.num_heads} query heads of a layer"
            )
        heads, kv_heads = (rows.own_units(shard) for rows in head_rows(self))
        sinks = self.rules.sinks
        own = None if sinks is None else sinks[heads.start : heads.stop]
        return replace(
            self,
            num_heads=len(heads),
            kv_heads=len(kv_heads),
            rules=replace(self.rules, sinks=own),
            first_kv_head=kv_heads.start,
            model_kv_heads=self.kv_heads,
        )


class AttentionSublayer(Protocol):
    """An attention sublayer behind a norm. The layer multiplies its output by `out`, and adds it to the residual."""

    ops: FusedOps
    out: Linear

    def linears(self) -> list[Linear]: ...

    def prepare(self) -> None:
        """Prepares norms, once the weights are loaded. The model prepares the linear layers."""

    def attend(self, residual: Tensor, delta: Tensor | None, norm: Norm, rotation: Rotation, backend: Attend) -> Tensor:
        """Adds delta to residual in place, and computes attention of its norm: -> the input of `out`.

        It has the rows of residual, or fewer if `backend` computes fewer.
        """


def head_rows(shape: AttentionShape) -> tuple[Rows, Rows]:
    """The outputs of q, and of k or v."""
    size = shape.head_dim
    of_q = Rows(shape.num_heads * size, shape.num_heads, shape.kv_heads)
    return of_q, Rows(shape.kv_heads * size, shape.kv_heads)


class QKVProjection(Protocol):
    """How a checkpoint stores the matrices of q, k and v."""

    def make(self, layers: LinearLayers, prefix: str, hidden: int, shape: AttentionShape, arrange: Arrange) -> Linear:
        """Makes the product that computes q, k and v of a token, head after head.

        arrange: reorders the rows of all heads of q, and of k, for the rotation.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class SeparateQKV:
    """Three matrices."""

    names: tuple[str, str, str] = ("q_proj", "k_proj", "v_proj")
    bias: bool = False

    def make(self, layers: LinearLayers, prefix: str, hidden: int, shape: AttentionShape, arrange: Arrange) -> Linear:
        """Implements `QKVProjection`."""
        q, k, v = (f"{prefix}.{name}" for name in self.names)
        of_q, of_kv = head_rows(shape)
        parts = [part(q, of_q, arrange=arrange), part(k, of_kv, arrange=arrange), part(v, of_kv)]
        return layers.make(parts, hidden, split=Split.OUTPUTS, bias=self.bias, fusion=Fusion.NORM)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeysAsValues:
    """Two matrices: v is k before norm and rotation. The rows of k's matrix are twice in memory."""

    bias: bool = False

    def make(self, layers: LinearLayers, prefix: str, hidden: int, shape: AttentionShape, arrange: Arrange) -> Linear:
        """Implements `QKVProjection`."""
        of_q, of_kv = head_rows(shape)
        keys = MatrixPart(
            name=f"{prefix}.k_proj",
            rows=(of_kv, of_kv),
            arrange=lambda rows: torch.cat((arrange(rows), rows)),
            stored_rows=of_kv.size,
        )
        parts = [part(f"{prefix}.q_proj", of_q, arrange=arrange), keys]
        return layers.make(parts, hidden, split=Split.OUTPUTS, bias=self.bias, fusion=Fusion.NORM)


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedQKV:
    """One matrix: all of q, then all of k, then all of v; or `by_group`, q heads and their k and v side by side."""

    name: str
    bias: bool = False
    by_group: bool = False  # the q heads that share a K/V head, then their k, then their v
    transposed: bool = False  # stored as [in, out]

    def make(self, layers: LinearLayers, prefix: str, hidden: int, shape: AttentionShape, arrange: Arrange) -> Linear:
        """Implements `QKVProjection`."""
        (of_q, of_kv), head_dim = head_rows(shape), shape.head_dim

        def split_and_arrange(rows: Tensor) -> Tensor:
            if self.by_group:
                groups = rows.reshape(shape.kv_heads, -1, head_dim, *rows.shape[1:])
                q, k, v = groups[:, :-2], groups[:, -2], groups[:, -1]
                rows = torch.cat([part.reshape(-1, *rows.shape[1:]) for part in (q, k, v)])
            end = of_q.size + of_kv.size
            return torch.cat((arrange(rows[: of_q.size]), arrange(rows[of_q.size : end]), rows[end:]))

        joined = MatrixPart(name=f"{prefix}.{self.name}", rows=(of_q, of_kv, of_kv), arrange=split_and_arrange)
        return layers.make(
            [joined], hidden, split=Split.OUTPUTS, bias=self.bias, fusion=Fusion.NORM, transposed=self.transposed
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionOptions:
    """How the attention of a model family differs from Llama's."""

    qkv: QKVProjection = SeparateQKV()
    out_name: str = "o_proj"  # of the output projection in checkpoints
    out_bias: bool = False
    out_transposed: bool = False  # stored as [in, out]
    sinks_name: str = "sinks"  # of the sinks in checkpoints, if the layer has them
    qk_norm: MakeQKNorm | None = None  # before the rotation
    halves_dim: int | None = None  # pairs are the two halves of so many first numbers of a head; 0: they are side by
    # side, or q and k are not rotated; None: of the whole head


LLAMA = AttentionOptions()


class Attention:
    """The attention of one layer. The attention backend normalises and rotates q and k, and stores k and v."""

    def __init__(
        self,
        layers: LinearLayers,
        prefix: str,
        layer: int,
        hidden: int,
        shape: AttentionShape,
        options: AttentionOptions = LLAMA,
    ) -> None:
        """prefix: of the layer's names in checkpoints. hidden: size of the hidden state."""
        head_dim, own = shape.head_dim, shape.share(layers.table.shard)
        self.ops = ops_of(layers.table)
        self._layer, self._heads, self._head_dim = layer, own.num_heads, head_dim
        self._all_heads = own.num_heads + 2 * own.kv_heads

        def arrange(rows: Tensor) -> Tensor:
            return rows if options.halves_dim == 0 else interleave_pairs(rows, head_dim, options.halves_dim)

        self.qkv = options.qkv.make(layers, prefix, hidden, shape, arrange)
        self.out = layers.make(
            [part(f"{prefix}.{options.out_name}", hidden)],
            head_rows(shape)[0],
            split=Split.INPUTS,
            bias=options.out_bias,
            fusion=Fusion.ADD,
            transposed=options.out_transposed,
        )
        if shape.rules.sinks is not None:
            layers.table.place(f"{prefix}.{options.sinks_name}", shape.rules.sinks, (shape.num_heads,))
        self._fused_norm: RMSNorm | None = None
        self._separate_norm: SeparateQKNorm | DividedQKNorm | None = None
        if options.qk_norm is not None:
            norm = options.qk_norm(layers.table, prefix, *head_rows(shape), arrange)
            if isinstance(norm, RMSNorm):
                self._fused_norm = norm
            else:
                self._separate_norm = norm

    def linears(self) -> list[Linear]:
        return [self.qkv, self.out]

    def prepare(self) -> None:
        """Prepares the norm of q and k, once the weights are loaded. The model prepares the linear layers."""
        for norm in (self._fused_norm, self._separate_norm):
            if norm is not None:
                norm.prepare()

    def attend(self, residual: Tensor, delta: Tensor | None, norm: Norm, rotation: Rotation, backend: Attend) -> Tensor:
        """Implements `AttentionSublayer`."""
        return self._attend(self.ops.norm_then_linear(self.qkv, residual, delta, norm), rotation, backend)

    def attend_normed(self, x: Tensor, rotation: Rotation, backend: Attend) -> Tensor:
        """Attends for a normalised hidden state x [tokens, hidden]: see `attend`."""
        return self._attend(self.qkv(x), rotation, backend)

    def _attend(self, qkv: Tensor, rotation: Rotation, backend: Attend) -> Tensor:
        """qkv [tokens, (heads + 2 * kv_heads) * head_dim] -> [rows, heads * head_dim]."""
        heads = qkv.view(-1, self._all_heads, self._head_dim)
        if self._separate_norm is not None:
            self._separate_norm.apply(heads)
        if rotation.query_scale is not None:
            heads[:, : self._heads].mul_(rotation.query_scale)
        return backend(self._layer, heads, rotation.angles, self._fused_norm)
