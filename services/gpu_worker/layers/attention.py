"""The attention sublayer: QKV projection, attention over the paged KV cache, output projection."""

from dataclasses import dataclass

from torch import Tensor

from blockyard.kernels.layers.apply_rope import interleave_pairs
from blockyard.kernels.layers.rms_norm import RMSNorm
from blockyard.services.gpu_worker.layers.fused_ops import FusedOps
from blockyard.services.gpu_worker.layers.linear import Fusion, Linear, LinearLayers
from blockyard.services.gpu_worker.step import Step


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """The attention sizes of one layer. Layers of a model may differ."""

    num_heads: int
    kv_heads: int
    head_dim: int
    scale: float  # factor of q @ k before the softmax
    window: int | None = None  # number of last keys, its own included, that a token attends to; None: all


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionOptions:
    """How the attention of a model family differs from Llama's."""

    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm_eps: float | None = None  # of an RMSNorm over each head of q and k, before the rotation; None: no norm
    rotary: bool = True
    out_name: str = "o_proj"  # of the output projection in checkpoints


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
        heads, kv_heads, head_dim = shape.num_heads, shape.kv_heads, shape.head_dim
        self._layer, self._head_dim, self._all_heads = layer, head_dim, heads + 2 * kv_heads

        def interleave(rows: Tensor) -> Tensor:
            return interleave_pairs(rows, head_dim)

        q, k, v = (f"{prefix}.{name}_proj" for name in "qkv")
        outputs = {q: heads * head_dim, k: kv_heads * head_dim, v: kv_heads * head_dim}
        arrange = {q: interleave, k: interleave} if options.rotary else {}
        self.qkv = layers.make(outputs, hidden, bias=options.qkv_bias, arrange=arrange, fusion=Fusion.NORM)
        out_name = f"{prefix}.{options.out_name}"
        self.out = layers.make({out_name: hidden}, heads * head_dim, bias=options.out_bias, fusion=Fusion.ADD)
        self._qk_norm: RMSNorm | None = None
        if options.qk_norm_eps is not None:  # all q heads share one weight, all k heads another
            weight = layers.table.empty(heads + kv_heads, head_dim)
            layers.table.place(f"{prefix}.q_norm.weight", weight[:heads], (head_dim,), interleave)
            layers.table.place(f"{prefix}.k_norm.weight", weight[heads:], (head_dim,), interleave)
            self._qk_norm = RMSNorm(weight, options.qk_norm_eps)

    def linears(self) -> list[Linear]:
        return [self.qkv, self.out]

    def prepare(self) -> None:
        """Prepares the norm of q and k, once the weights are loaded. The model prepares the linear layers."""
        if self._qk_norm is not None:
            self._qk_norm.prepare()

    def attend(self, qkv: Tensor, rotation: Tensor | None, step: Step) -> Tensor:
        """Computes attention: qkv [tokens, (heads + 2 * kv_heads) * head_dim], rotation [tokens, 1, head_dim / 2] ->
        [tokens, heads * head_dim]. In the last layer only the rows of `step.logits_indices` are returned."""
        return step.attend(self._layer, qkv.view(-1, self._all_heads, self._head_dim), rotation, self._qk_norm)

    def forward(
        self,
        ops: FusedOps,
        residual: Tensor,
        delta: Tensor | None,
        norm: RMSNorm,
        rotation: Tensor | None,
        step: Step,
        rows: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Computes the sublayer. Adds delta to residual in place.

        Returns residual and the new delta, which the caller adds to residual; a delta of None is already added. Both
        have the rows in `rows`; None: all rows.
        """
        attended = self.attend(ops.norm_then_linear(self.qkv, residual, delta, norm), rotation, step)
        if rows is not None:
            residual = residual.index_select(0, rows)
        return residual, ops.linear_then_add(self.out, attended, residual)
