"""The demo model as plain torch for training: the Llama architecture, with Hugging Face's weight names.

Serving has its own (`services/gpu_worker/models`); the two share the checkpoint and nothing else.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Shape:
    vocab: int = 4096
    hidden: int = 256
    inner: int = 1024
    layers: int = 6
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    max_positions: int = 4096
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5


def rope_tables(shape: Shape) -> tuple[Tensor, Tensor]:
    """cos and sin, each [max_positions, head_dim] float32, the two halves alike."""
    exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    angles = torch.outer(torch.arange(shape.max_positions, dtype=torch.float32), shape.rope_theta**-exponents)
    both = torch.cat((angles, angles), dim=-1)
    return both.cos(), both.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [batch, heads, tokens, head_dim]; cos and sin [tokens, head_dim]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos.to(x.dtype) + torch.cat((-second, first), dim=-1) * sin.to(x.dtype)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = nn.Linear(shape.hidden, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # [batch, tokens, hidden] -> the same
        batch, tokens, _ = x.shape
        groups = self.shape.heads // self.shape.kv_heads
        q = self.q_proj(x).view(batch, tokens, self.shape.heads, self.shape.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(batch, tokens, self.shape.kv_heads, self.shape.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(batch, tokens, self.shape.kv_heads, self.shape.head_dim).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, tokens, -1))
        return out


class MLP(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.down_proj = nn.Linear(shape.inner, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # [..., hidden] -> the same
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = MLP(shape)
        self.input_layernorm = nn.RMSNorm(shape.hidden, eps=shape.norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, eps=shape.norm_eps)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.drop(self.self_attn(self.input_layernorm(x), cos, sin))
        out: Tensor = x + self.drop(self.mlp(self.post_attention_layernorm(x)))
        return out


class Llama(nn.Module):
    """Tied embeddings. Dropout acts in training alone, on the embeddings and on what each block adds."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape, dropout) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, eps=shape.norm_eps)
        self.drop = nn.Dropout(dropout)
        cos, sin = rope_tables(shape)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                # what a block adds to the residual starts small, so that depth does not scale the stream
                scale = math.sqrt(2 * shape.layers) if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
                nn.init.normal_(weight, std=0.02 / scale)

    def forward(self, token_ids: Tensor) -> Tensor:
        """[batch, tokens] of ids -> [batch, tokens, vocab] of logits."""
        tokens = token_ids.shape[1]
        x = self.drop(self.embed_tokens(token_ids))
        for layer in self.layers:
            x = layer(x, self.cos[:tokens], self.sin[:tokens])
        return F.linear(self.norm(x), self.embed_tokens.weight)


def num_parameters(model: nn.Module) -> int:
    return sum(weight.numel() for weight in model.parameters())


def save_weights(model: Llama, target: Path) -> None:
    """bf16 safetensors with Hugging Face's names; the tied head is not stored twice."""
    weights = {f"model.{name}": weight.to(torch.bfloat16).cpu() for name, weight in model.state_dict().items()}
    save_file(weights, target, metadata={"format": "pt"})


def load_weights(model: Llama, source: Path) -> None:
    weights = {name.removeprefix("model."): weight.float() for name, weight in load_file(source).items()}
    model.load_state_dict(weights)
