"""What adapters change of the rows that embedding and head have for tokens: of those tokens that a rank has."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from blockyard.services.gpu_worker.layers.embedding import TokenEmbedding
from blockyard.services.gpu_worker.layers.linear import Linear
from blockyard.services.gpu_worker.loading.checkpoint_names import bare
from blockyard.services.gpu_worker.lora.added_tokens.added_rows import AddedRows, TokenMatrix, cut_added
from blockyard.services.gpu_worker.lora.module_tensors import ModuleTensors
from blockyard.services.gpu_worker.models.interface import Model
from blockyard.shared.errors import AdapterError
from blockyard.shared.lora.adapter_config import AdapterConfig

DIRECTIONS = 8  # that rows are compared in
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}  # of a row's length
OF_EMBEDDING, OF_HEAD = "embed_tokens", "lm_head"  # names of modules in vLLM's file of added tokens


@dataclass(frozen=True, slots=True)
class ReplacedRows:
    """Rows of a matrix [vocab_size, width] that an adapter has replaced."""

    token_ids: Tensor  # [n] int64, ascending, counted from the first token that the rank has; added ones behind all
    values: Tensor  # [n, width]


@dataclass(frozen=True, slots=True)
class EmbeddingDelta:
    """What an adapter changes of the embedding of tokens: replaced rows, and a[token] @ b.T for all."""

    a: Tensor | None = None  # [tokens that the rank has, rank]
    b: Tensor | None = None  # [width, rank], times the scale
    rows: ReplacedRows | None = None


@dataclass(frozen=True, slots=True)
class TokenDeltas:
    """What an adapter changes of embedding and head, beside linear layers."""

    embedding: EmbeddingDelta | None = None
    head_rows: ReplacedRows | None = None
    head_layer: int | None = None  # index of the head in the layers that adapters may change
    num_added: int = 0  # tokens behind the vocabulary, whose rows of the embedding are in `embedding` ...
    added_head: Tensor | None = None  # ... and whose rows of the head are these; None: they are not generated here

    def tensors(self) -> list[Tensor]:
        one = self.embedding or EmbeddingDelta()
        rows = [rows for rows in (one.rows, self.head_rows) if rows is not None]
        found = [self.added_head, one.a, one.b, *(rows.token_ids for rows in rows), *(rows.values for rows in rows)]
        return [tensor for tensor in found if tensor is not None]


@dataclass(frozen=True, slots=True)
class HeadTarget:
    """The output layer of a model."""

    name: str  # of its module
    layer: int  # index in the layers that adapters may change
    linear: Linear


class TokenTargets:
    """The embedding and the head of one model, under the names of their modules."""

    def __init__(self, model: Model, head: HeadTarget | None, has_module: Callable[[str], bool]) -> None:
        """head: None: the model has none here. has_module: whether a rank has a linear layer of this name."""
        self._embedding, self._dtype, self._stage = model.adaptable.embedding, model.table.dtype, model.table.stage
        self._shard, self._has_module = model.table.shard, has_module
        self._head, self._head_name, self._head_layer = None, "", None
        if head is not None:
            self._head_name, self._head_layer, self._head = bare(head.name), head.layer, head.linear
        own_name = "" if self._embedding is None else bare(self._embedding.name)
        self._adding = {OF_EMBEDDING, own_name}, {OF_HEAD, self._head_name}  # names of modules of each

    def names(self) -> list[str]:
        return [] if self._embedding is None else [self._embedding.name]

    def may_add(self, module: str) -> bool:
        """Whether a module of this name may have rows of tokens that the adapter adds."""
        return any(bare(module) in names for names in self._adding)

    def cut_added(self, modules: Sequence[ModuleTensors], config: AdapterConfig, most: int) -> AddedRows | None:
        """Takes the rows of tokens that the adapter adds out of its modules. Raises AdapterError.

        modules: those that may have them. most: such tokens.
        """
        embedding = self._embedding
        if embedding is None:
            return None
        of_embedding, of_head = ([one for one in modules if bare(one.name) in names] for names in self._adding)
        is_tied = embedding.has_tied_head and self._head is not None
        added = cut_added(of_embedding, of_head, TokenMatrix(*_shape(embedding)), config, is_tied=is_tied)
        if added is None:
            return None
        if self._head is not None and self._head.spec.bias and added.head is not None:
            raise AdapterError(f"the adapter adds tokens to {self._head_name}, which has a bias")
        if len(added) > most:
            raise AdapterError(f"the adapter adds {len(added)} tokens, --lora-extra-vocab-size is {most}")
        return added

    def arrange(
        self,
        modules: Sequence[ModuleTensors],
        config: AdapterConfig,
        dtype: torch.dtype,
        most: int,
        added: AddedRows | None = None,
    ) -> TokenDeltas | None:
        """most: rows that an adapter may replace of a matrix. added: see `cut_added`. Raises AdapterError."""
        embedding: EmbeddingDelta | None = None
        head_rows: ReplacedRows | None = None
        for module in modules:
            if self._embedding is not None and bare(module.name) == bare(self._embedding.name):
                is_tied = module.token_rows is not None and self._embedding.has_tied_head and self._head is not None
                if not is_tied and self._stage is not None and not self._stage.is_first:
                    continue
                embedding = self._embedding_delta(self._embedding, module, config, dtype, most)
                if is_tied and head_rows is None:
                    head_rows = embedding.rows  # PEFT trains one row of both
            elif self._head is None and module.token_a is None and self._has_module(module.name):
                continue  # the head, which another stage has
            elif self._head is not None and bare(module.name) == self._head_name and module.token_a is None:
                if self._head.spec.bias:
                    raise AdapterError(f"the adapter has rows of its own for {module.name}, which has a bias")
                head_rows = self._rows(module, config, dtype, most, self._head)
            else:
                served = "of the head" if self._embedding is None else "of embedding and head"
                raise AdapterError(
                    f"the adapter has a matrix of its own for {module.name}: only those {served} are served here "
                    "beside linear layers; merge it into its base"
                )
        deltas = TokenDeltas(embedding, head_rows, self._head_layer)
        if added is not None and self._embedding is not None:
            return self._with_added(deltas, added, self._embedding, dtype)
        return None if embedding is None and head_rows is None else deltas

    def _with_added(
        self, deltas: TokenDeltas, added: AddedRows, embedding: TokenEmbedding, dtype: torch.dtype
    ) -> TokenDeltas:
        """The last rank of the first stage has the rows of the embedding, and the leader those of the head."""
        head = None if added.head is None or self._shard.rank else added.head.to(dtype).contiguous()
        deltas = replace(deltas, num_added=len(added), added_head=head)
        if (self._stage is None or self._stage.is_first) and embedding.own_tokens.stop == embedding.vocab_size:
            before, num = deltas.embedding or EmbeddingDelta(), len(embedding.own_tokens)
            deltas = replace(deltas, embedding=_longer(before, num, added.embedding.to(dtype).contiguous()))
        return deltas

    def _embedding_delta(
        self, embedding: TokenEmbedding, module: ModuleTensors, config: AdapterConfig, dtype: torch.dtype, most: int
    ) -> EmbeddingDelta:
        vocab_size, width = _shape(embedding)
        rows, tokens = None, embedding.own_tokens
        if module.weight is not None or module.token_rows is not None:
            rows = self._rows(module, config, dtype, most, embedding)
        if module.base is not None and len(changed := self._changed(module.name, module.base, embedding)):
            raise AdapterError(
                f"the adapter has a weight of its own for {module.name}, of which {len(changed)} rows are not the "
                "model's: merge it into its base"
            )
        if module.token_a is None or module.token_b is None:
            return EmbeddingDelta(rows=rows)
        if module.token_a.shape[1] != vocab_size or module.token_b.shape[0] != width:
            shapes = f"{tuple(module.token_a.shape)} and {tuple(module.token_b.shape)}"
            raise AdapterError(
                f"lora_embedding_A and B of {module.name} have the shapes {shapes}; this model has {vocab_size} tokens "
                f"of {width} numbers"
            )
        b = (module.token_b.float() * module.scale).to(dtype).contiguous()
        return EmbeddingDelta(module.token_a[:, tokens.start : tokens.stop].T.to(dtype).contiguous(), b, rows)

    def _rows(
        self, module: ModuleTensors, config: AdapterConfig, dtype: torch.dtype, most: int, own: TokenEmbedding | Linear
    ) -> ReplacedRows:
        """most: rows, counted on each rank."""
        tokens = self._own_tokens(own)
        if module.token_rows is not None:
            vocab_size, width = _shape(own)
            ids = torch.tensor(config.tokens_of(module.name), dtype=torch.int64)
            if len(module.token_rows) < len(ids):  # `cut_added` has taken the others
                ids = ids[ids < vocab_size]
            if module.token_rows.shape[1:] != (width,) or len(set(ids.tolist())) < len(ids):
                shape = tuple(module.token_rows.shape)
                raise AdapterError(f"the trained rows of {module.name} have the shape {shape}, or one is named twice")
            if wrong := [one for one in ids.tolist() if not 0 <= one < vocab_size]:
                raise AdapterError(f"{module.name}: token {wrong[0]} is not one of the model's {vocab_size}")
            ids, order = ids.sort()
            is_here = (ids >= tokens.start) & (ids < tokens.stop)
            ids, values = ids[is_here], module.token_rows[order[is_here]]
        else:
            assert module.weight is not None
            ids = self._changed(module.name, module.weight, own)
            values = module.weight[ids]
        if len(ids) > most:
            raise AdapterError(
                f"the adapter has {len(ids)} rows of its own for {module.name}, --lora-extra-vocab-size is {most}: "
                "merge such an adapter into its base"
            )
        return ReplacedRows(ids - tokens.start, values.to(dtype).contiguous())

    def _own_tokens(self, own: TokenEmbedding | Linear) -> range:
        return own.own_tokens if isinstance(own, TokenEmbedding) else own.spec.rows(own.spec.parts[0], self._shard)[0]

    def _changed(self, name: str, weight: Tensor, own: TokenEmbedding | Linear) -> Tensor:
        """The tokens of this rank whose rows of a matrix that came with an adapter are not the model's: [n] int64.

        Rows are compared by their products with random directions, which any format of weights has.
        """
        if weight.shape != (shape := _shape(own)):
            raise AdapterError(f"the matrix of {name} has the shape {tuple(weight.shape)}; this model has {shape}")
        generator = torch.Generator().manual_seed(0)
        directions = torch.randn(DIRECTIONS, shape[1], generator=generator)
        with torch.inference_mode():
            of_base, here = _products(own, directions), self._own_tokens(own)
            given = weight[here.start : here.stop].to(self._dtype).float()
            off = (given @ directions.T - of_base).abs().amax(1)
            lengths = given.norm(dim=1)
        exact = torch.float32 if _stored(own) is not None else self._dtype
        return torch.nonzero(off > lengths * TOLERANCE[exact] + 1e-30).flatten() + here.start


def _longer(before: EmbeddingDelta, num_tokens: int, rows: Tensor) -> EmbeddingDelta:
    """With rows of tokens behind `num_tokens`. LoRA matrices change them no further: `cut_added` has added these."""
    ids, values = torch.arange(num_tokens, num_tokens + len(rows)), rows
    if before.rows is not None:
        ids, values = torch.cat([before.rows.token_ids, ids]), torch.cat([before.rows.values, values])
    a = None if before.a is None else torch.cat([before.a, before.a.new_zeros(len(rows), before.a.shape[1])])
    return EmbeddingDelta(a, before.b, ReplacedRows(ids, values))


def _shape(own: TokenEmbedding | Linear) -> tuple[int, int]:
    """Of all ranks."""
    if isinstance(own, TokenEmbedding):
        return own.vocab_size, own.weight.shape[1]
    return own.spec.parts[0].size, own.spec.in_features


def _stored(own: TokenEmbedding | Linear) -> Tensor | None:
    """The weight itself, if it is kept as numbers."""
    if isinstance(own, TokenEmbedding):
        return own.weight
    weight = own.method.tensors().get("weight")
    if weight is None or not weight.is_floating_point():
        return None
    return weight if weight.shape == (own.shape[1], own.shape[0]) else None


def _products(own: TokenEmbedding | Linear, directions: Tensor) -> Tensor:
    """[tokens of the rank, DIRECTIONS] float32."""
    if (stored := _stored(own)) is not None:
        return (stored.float() @ directions.T.to(stored.device)).cpu()
    assert isinstance(own, Linear)
    return own.method.apply(directions).float().cpu().T
