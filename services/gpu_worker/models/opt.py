"""OPT: learned positions, LayerNorm with biases, ReLU, and no gate in the MLP."""

from typing import Any

import msgspec
import torch.nn.functional as F
from torch import Tensor

from blockyard.services.gpu_worker.layers.linear import Linear
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.models.decoder import ModelShape
from blockyard.services.gpu_worker.models.hf_config import parse
from blockyard.services.gpu_worker.step import Step
from blockyard.shared.config import model_bounds as bounds
from blockyard.shared.errors import ConfigError

POSITION_OFFSET = 2  # the first two rows of the table stand for padding


class OPTConfig(msgspec.Struct, frozen=True, rename={"remove_final_layer_norm": "_remove_final_layer_norm"}):
    vocab_size: bounds.Vocabulary
    hidden_size: bounds.Width
    ffn_dim: bounds.Width
    num_hidden_layers: bounds.Layers
    num_attention_heads: bounds.Heads
    max_position_embeddings: bounds.Positions = 2048
    word_embed_proj_dim: bounds.Width | None = None  # None: hidden_size
    do_layer_norm_before: bool = True  # opt-350m normalises after
    remove_final_layer_norm: bool = False
    enable_bias: bool = True
    layer_norm_elementwise_affine: bool = True
    activation_function: str = "relu"
    tie_word_embeddings: bool = True


def build(config: dict[str, Any], table: WeightTable) -> "OPT":
    fields = parse(config, OPTConfig)
    if fields.activation_function != "relu":
        raise ConfigError(f"config.json: activation_function {fields.activation_function!r} is not supported")
    if fields.hidden_size % fields.num_attention_heads:
        raise ConfigError(f"config.json: {fields.num_attention_heads} heads do not divide {fields.hidden_size}")
    return OPT(fields, table)


class LayerNorm:
    def __init__(self, config: OPTConfig, new: WeightTable, name: str) -> None:
        self._size = (config.hidden_size,)
        self._weight: Tensor | None = None
        self._bias: Tensor | None = None
        if config.layer_norm_elementwise_affine:
            self._weight = new.vector(f"{name}.weight", config.hidden_size)
            self._bias = new.vector(f"{name}.bias", config.hidden_size)

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self._size, self._weight, self._bias)


class Block:
    def __init__(self, config: OPTConfig, layer: int, new: WeightTable) -> None:
        prefix, hidden = f"model.decoder.layers.{layer}", config.hidden_size
        bias = config.enable_bias
        self._layer, self._heads = layer, config.num_attention_heads
        self._before = config.do_layer_norm_before
        self.norm1 = LayerNorm(config, new, f"{prefix}.self_attn_layer_norm")
        sizes = dict.fromkeys(("q_proj", "k_proj", "v_proj"), hidden)
        self.qkv = Linear(*new.packed(f"{prefix}.self_attn", sizes, hidden, bias))
        self.out = _linear(new, f"{prefix}.self_attn.out_proj", hidden, hidden, bias)
        self.norm2 = LayerNorm(config, new, f"{prefix}.final_layer_norm")
        self.fc1 = _linear(new, f"{prefix}.fc1", config.ffn_dim, hidden, bias)
        self.fc2 = _linear(new, f"{prefix}.fc2", hidden, config.ffn_dim, bias)

    def linears(self) -> list[Linear]:
        return [self.qkv, self.out, self.fc1, self.fc2]

    def forward(self, x: Tensor, step: Step, logits_indices: Tensor | None) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden], of those in `logits_indices`, None: of all; may write to x."""
        qkv = self.qkv(self.norm1(x) if self._before else x)
        qkv = qkv.view(-1, 3 * self._heads, x.shape[1] // self._heads)
        attended = step.attend(self._layer, qkv)
        x = self.out.add_to(x if logits_indices is None else x.index_select(0, logits_indices), attended)
        if not self._before:
            x = self.norm1(x)
        x = self.fc2.add_to(x, self.fc1(self.norm2(x) if self._before else x).relu_())
        return x if self._before else self.norm2(x)


class OPT:
    """Build it, load `table`, call `prepare`."""

    def __init__(self, config: OPTConfig, table: WeightTable) -> None:
        hidden, heads = config.hidden_size, config.num_attention_heads
        narrow = config.word_embed_proj_dim or hidden
        self.shape = ModelShape(
            vocab_size=config.vocab_size,
            num_layers=config.num_hidden_layers,
            num_heads=heads,
            kv_heads=heads,
            head_dim=hidden // heads,
            max_positions=config.max_position_embeddings,
            scale=(hidden // heads) ** -0.5,
            windows=(None,) * config.num_hidden_layers,
        )
        self.table = new = table
        self.rotations: Tensor | None = None
        self._embedding = new.matrix("model.decoder.embed_tokens.weight", config.vocab_size, narrow)
        rows = config.max_position_embeddings + POSITION_OFFSET
        self._positions = new.matrix("model.decoder.embed_positions.weight", rows, hidden)
        self._project_in = self._project_out = None
        if narrow != hidden:
            self._project_in = _linear(new, "model.decoder.project_in", hidden, narrow, bias=False)
            self._project_out = _linear(new, "model.decoder.project_out", narrow, hidden, bias=False)
        self._blocks = [Block(config, layer, new) for layer in range(config.num_hidden_layers)]
        has_norm = config.do_layer_norm_before and not config.remove_final_layer_norm
        self._norm = LayerNorm(config, new, "model.decoder.final_layer_norm") if has_norm else None
        if config.tie_word_embeddings:
            new.ignore("lm_head.weight")
            self._head = Linear(self._embedding)
        else:
            self._head = Linear(new.matrix("lm_head.weight", config.vocab_size, narrow))

    def prepare(self, max_model_len: int) -> None:
        """Call once the weights are loaded."""
        for linear in self.linears():
            linear.prepare()
        self._positions = self._positions[POSITION_OFFSET : POSITION_OFFSET + max_model_len]

    def linears(self) -> list[Linear]:
        around = [linear for linear in (self._project_in, self._project_out) if linear is not None]
        return [*(linear for block in self._blocks for linear in block.linears()), *around, self._head]

    def forward(self, step: Step) -> Tensor:
        """[tokens, hidden], ready for `logits`."""
        x = F.embedding(step.token_ids, self._embedding)
        if self._project_in is not None:
            x = self._project_in(x)
        x = x + self._positions.index_select(0, step.positions)
        last = self._blocks[-1]
        for block in self._blocks:
            x = block.forward(x, step, step.logits_indices if block is last else None)
        return self._norm(x) if self._norm is not None else x

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] -> [rows, vocab_size] in the model's dtype."""
        return self._head(self._project_out(hidden) if self._project_out is not None else hidden)


def _linear(new: WeightTable, name: str, rows: int, columns: int, bias: bool) -> Linear:
    weight = new.matrix(f"{name}.weight", rows, columns)
    return Linear(weight, new.vector(f"{name}.bias", rows) if bias else None)
