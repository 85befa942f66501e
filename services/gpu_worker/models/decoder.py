"""The decoder block that the families share: what they differ in is a field of `DecoderShape`."""

from dataclasses import dataclass
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from blockyard.kernels.layers.apply_rope import interleave_pairs
from blockyard.kernels.layers.rms_norm import RMSNorm
from blockyard.services.gpu_worker.layers.fused_ops import Ops, find_ops
from blockyard.services.gpu_worker.layers.linear import Linear
from blockyard.services.gpu_worker.layers.rotary import RopeParameters, check_rotations, extended_length, rotation_table
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.step import Step


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What the runner, the memory plan and the scheduler have to know of a model."""

    vocab_size: int
    num_layers: int
    num_heads: int
    kv_heads: int
    head_dim: int
    max_positions: int  # longest sequence the model was made for
    scale: float  # on the scores
    windows: tuple[int | None, ...]  # a layer: how many of the last keys, itself included, a token sees; None all


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """A Llama-like model in numbers."""

    vocab_size: int
    hidden: int
    inner: int
    num_layers: int
    num_heads: int
    kv_heads: int
    head_dim: int
    max_positions: int
    norm_eps: float
    rope: RopeParameters
    windows: tuple[int | None, ...]
    tied: bool = False  # the output matrix is the embedding
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm over each head of q and k, before the rotation


class Model(Protocol):
    shape: ModelShape
    table: WeightTable
    rotations: Tensor | None  # [positions, 1, head_dim / 2] complex64, once it is prepared

    def prepare(self, max_model_len: int) -> None: ...
    def linears(self) -> list[Linear]: ...
    def forward(self, step: Step) -> Tensor: ...
    def logits(self, hidden: Tensor) -> Tensor: ...


class Attention:
    """q, k and v in one product, handed over as one row; q and k are still to be normalised and rotated."""

    def __init__(self, shape: DecoderShape, layer: int, new: "WeightTable", prefix: str) -> None:
        heads, kv_heads, head_dim = shape.num_heads, shape.kv_heads, shape.head_dim
        self._layer, self._head_dim = layer, head_dim
        self._all = heads + 2 * kv_heads

        def reorder(rows: Tensor) -> Tensor:
            return interleave_pairs(rows, head_dim)

        sizes = {"q_proj": heads * head_dim, "k_proj": kv_heads * head_dim, "v_proj": kv_heads * head_dim}
        arrange = {"q_proj": reorder, "k_proj": reorder}
        packed = new.packed(f"{prefix}.self_attn", sizes, shape.hidden, shape.qkv_bias, arrange)
        self.qkv = Linear(*packed, around="norm")
        self.out = Linear(
            new.matrix(f"{prefix}.self_attn.o_proj.weight", shape.hidden, heads * head_dim),
            new.vector(f"{prefix}.self_attn.o_proj.bias", shape.hidden) if shape.out_bias else None,
            around="add",
        )
        self.norm: RMSNorm | None = None
        if shape.qk_norm:  # one weight for all q heads, one for all k heads
            weight = new.empty(heads + kv_heads, head_dim)
            new.place(f"{prefix}.self_attn.q_norm.weight", weight[:heads], (head_dim,), reorder)
            new.place(f"{prefix}.self_attn.k_norm.weight", weight[heads:], (head_dim,), reorder)
            self.norm = RMSNorm(weight, shape.norm_eps)

    def prepare(self) -> None:
        self.qkv.prepare()
        self.out.prepare()
        if self.norm is not None:
            self.norm.prepare()

    def forward(self, qkv: Tensor, rotation: Tensor, step: Step) -> Tensor:
        """qkv [tokens, heads of all * head_dim], rotation [tokens, 1, head_dim/2] -> [tokens, heads * head_dim], of
        those that `attend` returns."""
        return step.attend(self._layer, qkv.view(-1, self._all, self._head_dim), rotation, self.norm)


class GatedMLP:
    """down(silu(gate(x)) * up(x)), gate and up in one product."""

    def __init__(self, shape: DecoderShape, new: "WeightTable", prefix: str) -> None:
        sizes = {"gate_proj": shape.inner, "up_proj": shape.inner}
        self.gate_up = Linear(*new.packed(f"{prefix}.mlp", sizes, shape.hidden, shape.mlp_bias), around="norm")
        self.down = Linear(
            new.matrix(f"{prefix}.mlp.down_proj.weight", shape.hidden, shape.inner),
            new.vector(f"{prefix}.mlp.down_proj.bias", shape.hidden) if shape.mlp_bias else None,
            around="gate",
        )

    def prepare(self) -> None:
        self.gate_up.prepare()
        self.down.prepare()


class Block:
    def __init__(self, shape: DecoderShape, layer: int, new: "WeightTable", ops: Ops) -> None:
        self._ops = ops
        prefix = f"model.layers.{layer}"
        self.norm1 = RMSNorm(new.vector(f"{prefix}.input_layernorm.weight", shape.hidden), shape.norm_eps)
        self.attention = Attention(shape, layer, new, prefix)
        self.norm2 = RMSNorm(new.vector(f"{prefix}.post_attention_layernorm.weight", shape.hidden), shape.norm_eps)
        self.mlp = GatedMLP(shape, new, prefix)

    def prepare(self) -> None:
        for part in (self.norm1, self.attention, self.norm2, self.mlp):
            part.prepare()

    def linears(self) -> list[Linear]:
        return [self.attention.qkv, self.attention.out, self.mlp.gate_up, self.mlp.down]

    def forward(
        self, residual: Tensor, delta: Tensor | None, rotation: Tensor, step: Step, logits_indices: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """What the layer before left to be added goes to `residual`. Returns that and what this one leaves to be added,
        of the rows in `logits_indices`, None: of all."""
        ops, attention, mlp = self._ops, self.attention, self.mlp
        mixed = attention.forward(ops.enter(attention.qkv, residual, delta, self.norm1), rotation, step)
        if logits_indices is not None:
            residual = residual.index_select(0, logits_indices)
        delta = ops.leave(attention.out, mixed, residual)
        gate_up = ops.enter(mlp.gate_up, residual, delta, self.norm2)
        return residual, ops.leave(mlp.down, gate_up, residual, gated=True)


class Decoder:
    """A whole model. Build it, load `table`, call `prepare`."""

    def __init__(self, shape: DecoderShape, table: WeightTable) -> None:
        self._decoder = shape
        check_rotations(shape.rope, shape.head_dim, shape.max_positions)
        self.shape = ModelShape(
            vocab_size=shape.vocab_size,
            num_layers=shape.num_layers,
            num_heads=shape.num_heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            max_positions=extended_length(shape.rope, shape.max_positions),
            scale=shape.head_dim**-0.5,
            windows=shape.windows,
        )
        self.table = new = table
        self._embedding = new.matrix("model.embed_tokens.weight", shape.vocab_size, shape.hidden)
        self._ops = ops = find_ops(table.device)
        self._blocks = [Block(shape, layer, new, ops) for layer in range(shape.num_layers)]
        self._norm = RMSNorm(new.vector("model.norm.weight", shape.hidden), shape.norm_eps)
        if shape.tied:
            new.ignore("lm_head.weight")
            self._head = Linear(self._embedding)
        else:
            self._head = Linear(new.matrix("lm_head.weight", shape.vocab_size, shape.hidden))
        new.ignore_suffix(".rotary_emb.inv_freq")
        self.rotations: Tensor | None = None

    def prepare(self, max_model_len: int) -> None:
        """Call once the weights are loaded."""
        for block in self._blocks:
            block.prepare()
        self._norm.prepare()
        self._head.prepare()
        shape = self._decoder
        table = rotation_table(shape.rope, shape.head_dim, shape.max_positions, max_model_len)
        self.rotations = table.unsqueeze(1).to(self._embedding.device)

    def linears(self) -> list[Linear]:
        """In the order in which a step uses them."""
        return [*(linear for block in self._blocks for linear in block.linears()), self._head]

    def forward(self, step: Step) -> Tensor:
        """[tokens, hidden], normalised: ready for `logits`. Rows that are not wanted end with their K and V."""
        residual = F.embedding(step.token_ids, self._embedding)
        delta: Tensor | None = None
        assert self.rotations is not None
        rotation = self.rotations.index_select(0, step.positions)
        last = self._blocks[-1]
        for block in self._blocks:
            logits_indices = step.logits_indices if block is last else None
            residual, delta = block.forward(residual, delta, rotation, step, logits_indices)
        return self._ops.add_norm(residual, delta, self._norm)

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] -> [rows, vocab_size] in the model's dtype."""
        return self._head(hidden)
