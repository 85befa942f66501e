"""Output layers of models that do not generate: labels of sequences and tokens, rewards, scores by two tokens."""

from typing import Any, Protocol

import torch
from torch import Tensor

from blockyard.services.gpu_worker.layers.activations import ACTIVATIONS
from blockyard.services.gpu_worker.layers.embedding import HEAD, OutputLayer
from blockyard.services.gpu_worker.layers.linear import Linear, LinearLayers, dense_linear
from blockyard.services.gpu_worker.layers.norm import Norm
from blockyard.services.gpu_worker.loading.classifier_tokens import TOKEN_IDS
from blockyard.services.gpu_worker.loading.linear_spec import part
from blockyard.shared.config.pooling.activations import num_labels
from blockyard.shared.config.pooling.output_kinds import OutputKind
from blockyard.shared.errors import ConfigError

SCORE = "score"  # name of a decoder's classifier in checkpoints


class EmbeddingRows(Protocol):
    """An embedding table, as far as it is read here."""

    vocab_size: int

    def row(self, token_id: int) -> Tensor:
        """Returns the embedding [1, width] of a token as the checkpoint has it, on all ranks."""


class NoOutput:
    """Returns hidden states themselves."""

    def linears(self) -> list[Linear]:
        return []

    def __call__(self, hidden: Tensor) -> Tensor:
        return hidden


class Stack:
    """Linear layers with functions between them, and a norm before the last one where a family has it."""

    def __init__(self, linears: list[Linear], activation: str, norm: Norm | None = None) -> None:
        """activation: behind all but the last, a key of `ACTIVATIONS` or "tanh"."""
        self._linears, self._norm = linears, norm
        self._activate = torch.tanh if activation == "tanh" else ACTIVATIONS[activation]

    def linears(self) -> list[Linear]:
        return self._linears

    def __call__(self, hidden: Tensor) -> Tensor:
        for linear in self._linears[:-1]:
            hidden = self._activate(linear(hidden))
        if self._norm is not None:
            hidden = self._norm(hidden)
        return self._linears[-1](hidden)


def make_linear(layers: LinearLayers, name: str, outputs: int, inputs: int, *, bias: bool) -> Linear:
    """Makes a layer that each rank has whole."""
    return layers.make([part(name, outputs)], inputs, bias=bias)


def make_decoder_output(
    kind: OutputKind,
    config: dict[str, Any],
    layers: LinearLayers,
    embedding: EmbeddingRows,
    hidden: int,
    *,
    tied: bool,
) -> tuple[OutputLayer, int]:
    """Returns the output layer of a decoder that does not generate, and its number of outputs.

    tied: the output matrix of the language model is that of the embeddings. Raises ConfigError.
    """
    labels = num_labels(config)
    match kind:
        case OutputKind.NONE:
            return NoOutput(), hidden
        case OutputKind.REWARD | OutputKind.STEP_REWARD:
            labels = 1 if kind is OutputKind.REWARD else 2
            first = make_linear(layers, f"{SCORE}.0", hidden, hidden, bias=True)
            return Stack([first, make_linear(layers, f"{SCORE}.2", labels, hidden, bias=True)], "relu"), labels
        case OutputKind.TOKEN_CLASSES:
            layers.table.leave_out(f"{HEAD}.")
            return Stack([make_linear(layers, SCORE, labels, hidden, bias=True)], "relu"), labels
    if config.get("classifier_from_token") or config.get(TOKEN_IDS):
        return Stack([_token_classifier(config, layers, embedding, hidden, tied=tied)], "relu"), 1
    layers.table.leave_out(f"{HEAD}.")
    return Stack([make_linear(layers, SCORE, labels, hidden, bias=False)], "relu"), labels


def _token_classifier(
    config: dict[str, Any], layers: LinearLayers, embedding: EmbeddingRows, hidden: int, *, tied: bool
) -> Linear:
    """Makes a classifier of one label of the language model's output matrix: the row of the true token, minus that of
    the false one. The rest of the matrix is given up once it is loaded."""
    table, ids = layers.table, config.get(TOKEN_IDS)
    vocab_size = embedding.vocab_size
    if not isinstance(ids, list) or len(ids) not in (1, 2) or not all(isinstance(one, int) for one in ids):
        raise ConfigError(f"config.json: {TOKEN_IDS} {ids!r} has to be the ids of the false and the true token")
    if wrong := [one for one in ids if not 0 <= one < vocab_size]:
        raise ConfigError(f"config.json: {TOKEN_IDS} {wrong[0]} is outside of the vocabulary of {vocab_size} tokens")
    name = f"{HEAD}.weight"
    source: Tensor | None = None
    if tied:
        table.leave_out(f"{HEAD}.")
    else:
        source = table.matrix(name, vocab_size, hidden)
    row = table.empty(1, hidden)

    def take_rows() -> None:
        false, true = (embedding.row(one)[0] if source is None else source[one] for one in (ids[0], ids[-1]))
        row[0].copy_(true.float() if len(ids) == 1 else true.float() - false.float())
        if not tied:
            table.forget(name)

    table.after_load(take_rows)
    return dense_linear(row, name=SCORE)
