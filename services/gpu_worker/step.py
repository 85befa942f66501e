"""The arguments of a forward pass, built once for each step and shared by all layers."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from blockyard.kernels.layers.rms_norm import RMSNorm


class AdaptedHeads(Protocol):
    """Adds the products of adapters where the up-projections of a latent layer are applied. `rows`: which rows of the
    step these are; None: all."""

    def add_to_queries(self, out: Tensor, query: Tensor, rows: slice | Tensor | None = None) -> None:
        """Adds to out [n, heads, latent] what adapters make of query [n, heads, plain], in place."""

    def add_to_values(self, out: Tensor, attended: Tensor, rows: slice | Tensor | None = None) -> None:
        """Adds to out [n, heads, value] what adapters make of attended [n, heads, latent], in place."""

    def add_to_keys_values(self, out: Tensor, latents: Tensor, rows: slice | Tensor, repeats: int) -> None:
        """Adds to out [n * repeats, heads * (plain + value)] what adapters make of latents, in place. Each of `rows`
        stands for so many latents of its sequence."""


@dataclass(frozen=True, slots=True)
class LatentRows:
    """The inputs of a latent layer's attention beside the query: the rows of its KV cache and its up-projections."""

    rows: Tensor  # [tokens, latent + rotated], before norm and rotation; tokens may be strided
    norm: RMSNorm  # of the latent
    up: Tensor  # [heads, plain + value, latent], contiguous: of each head the matrices that make K, and V, of a latent
    plain_dim: int  # numbers of a head of K that are not rotated
    adapted: AdaptedHeads | None = None  # None: no row of the step has an adapter of the up-projections

    @property
    def to_keys(self) -> Tensor:
        """[heads, plain, latent]: moves queries into the latent."""
        return self.up[:, : self.plain_dim]

    @property
    def to_values(self) -> Tensor:
        """[heads, latent, value]."""
        return self.up[:, self.plain_dim :].mT


@dataclass(frozen=True, slots=True)
class LogitsIndices:
    """The tokens that need logits: the last token of each sequence. Each tensor is [n] int64."""

    rows: Tensor  # index in the tokens of the step; arbitrary for padding
    slots: Tensor  # below 0: padding
    positions: Tensor


class Attend(Protocol):
    """The attention of one step, called by each layer. Implemented in `attention/`."""

    def __call__(self, layer: int, qkv: Tensor, rotation: Tensor | None = None, norm: RMSNorm | None = None) -> Tensor:
        """Computes attention: qkv [tokens, heads + 2 * kv_heads, head_dim] -> [tokens, heads * head_dim].

        First normalises q and k by `norm` and rotates them by rotation [tokens, 1, head_dim / 2], if given, and stores
        K and V of these tokens. A norm with rows for all heads in its weight normalises v, too. May write to qkv.
        """

    def latent(self, layer: int, query: Tensor, rotation: Tensor | None, latent: LatentRows) -> Tensor:
        """Computes a latent layer: query [tokens, heads, plain + rotated] -> [tokens, heads * value].

        rotation [tokens, 1, rotated / 2] is that of the rotated parts. May write to the query and to `latent.rows`.
        """

    def of_rows(self, indices: LogitsIndices) -> "Attend":
        """Returns the attention that stores K and V of all tokens, but computes and returns only these rows."""


@dataclass(frozen=True, slots=True)
class InputVectors:
    """Tokens with a vector as input in place of the embedding of their id: rows of transformers' `inputs_embeds`."""

    rows: Tensor  # [n] int64, index in the tokens of the step, each once
    values: Tensor  # [n, width of the embeddings]

    def put(self, hidden: Tensor) -> None:
        """Writes the vectors over rows of hidden [tokens, width], the embeddings of the step."""
        hidden.index_copy_(0, self.rows, self.values.to(hidden.dtype))


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass over a flat batch of tokens."""

    token_ids: Tensor  # [tokens] int64
    positions: Tensor  # [tokens] int64, index of each token in its sequence
    attend: Attend
    logits_indices: LogitsIndices | None = None  # the rows that `Model.forward` returns; None: all tokens
    vectors: InputVectors | None = None  # None: the input of every token is its id
    hidden: Tensor | None = None  # [tokens, hidden], what the pipeline stage before this one has computed
    token_types: Tensor | None = None  # [tokens] int64, of encoders: which text of a pair; None: the first
