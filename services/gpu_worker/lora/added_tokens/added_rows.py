"""Takes the rows of added tokens out of an adapter's modules.

PEFT saves embedding and head of a model with resized embeddings whole, with the base's rows first. LoRA matrices and
trained rows of the same modules have the resized shapes, too. What they change of an added token is added to its row.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from blockyard.services.gpu_worker.lora.module_tensors import ModuleTensors
from blockyard.shared.errors import AdapterError
from blockyard.shared.lora.adapter_config import AdapterConfig


@dataclass(frozen=True, slots=True)
class AddedRows:
    """The rows of the tokens that an adapter adds, in the order of their ids."""

    embedding: Tensor  # [added, width]
    head: Tensor | None  # [added, width]; None: they are read and never generated

    def __len__(self) -> int:
        return len(self.embedding)


@dataclass(frozen=True, slots=True)
class TokenMatrix:
    """An embedding or a head of the model."""

    vocab_size: int
    width: int


def cut_added(
    embedding: Iterable[ModuleTensors],
    head: Iterable[ModuleTensors],
    matrix: TokenMatrix,
    config: AdapterConfig,
    *,
    is_tied: bool,
) -> AddedRows | None:
    """Takes the rows from `vocab_size` up out of the modules of the embedding and of the head.

    is_tied: the head has the embedding's rows, unless the adapter has others. Returns None if there are none. Raises
    AdapterError if rows are missing, or have other shapes.
    """
    of_embedding = [_cut(module, matrix, config) for module in embedding]
    of_head = [_cut(module, matrix, config) for module in head]
    rows, plain = _joined(of_embedding, "embedding", matrix)
    head_rows, _ = _joined(of_head, "head", matrix)
    if rows is None and head_rows is None:
        return None
    if rows is None:
        raise AdapterError("the adapter adds tokens to the head, and has no embedding for them")
    if head_rows is None and is_tied:
        head_rows = plain  # a LoRA matrix of the embedding does not change a tied head
    if head_rows is not None and head_rows.shape != rows.shape:
        raise AdapterError(f"the adapter adds {len(rows)} tokens to the embedding and {len(head_rows)} to the head")
    return AddedRows(rows, head_rows)


@dataclass(slots=True)
class _Cut:
    """What one module has for added tokens."""

    rows: Tensor | None = None  # [added, width]
    change: Tensor | None = None  # [added, width], of LoRA matrices
    trained: tuple[list[int], Tensor] | None = None  # indices, and the rows in their place


def _cut(module: ModuleTensors, matrix: TokenMatrix, config: AdapterConfig) -> _Cut:
    size, cut = matrix.vocab_size, _Cut()
    for field in ("base", "weight"):
        weight: Tensor | None = getattr(module, field)
        if weight is not None and weight.dim() == 2 and len(weight) > size:
            cut.rows = _checked(module, weight[size:].float(), matrix)
            setattr(module, field, weight[:size])
    if module.added is not None:
        cut.rows, module.added = _checked(module, module.added.float(), matrix), None
    if (a := module.token_a) is not None and (b := module.token_b) is not None and a.shape[1] > size:
        cut.change = _checked(module, a[:, size:].float().T @ b.float().T * module.scale, matrix)
        module.token_a = a[:, :size]
    if (a := module.a) is not None and (b := module.b) is not None and len(b) > size and a.shape[1] == matrix.width:
        cut.change = b[size:].float() @ a.float() * module.scale
        module.b = b[:size]
    if (trained := module.token_rows) is not None:
        ids = torch.tensor(config.tokens_of(module.name), dtype=torch.int64)
        if (is_added := ids >= size).any():
            cut.trained = (ids[is_added] - size).tolist(), _checked(module, trained[is_added].float(), matrix)
            module.token_rows = trained[~is_added] if (~is_added).any() else None
            if module.token_rows is None and module.weight is None:  # what is left is compared with the model's
                module.weight, module.base = module.base, None
    return cut


def _joined(cuts: Sequence[_Cut], what: str, matrix: TokenMatrix) -> tuple[Tensor | None, Tensor | None]:
    """The rows of one matrix, and the same without LoRA matrices."""
    rows = next((cut.rows for cut in cuts if cut.rows is not None), None)
    changes = [cut.change for cut in cuts if cut.change is not None]
    trained = [cut.trained for cut in cuts if cut.trained is not None]
    if rows is None:
        if changes or trained:
            named = f", such as token {matrix.vocab_size + min(trained[0][0])}" if trained else ""
            raise AdapterError(
                f"the adapter changes tokens behind the model's {matrix.vocab_size}{named}, and has no rows of the "
                f"{what} for them: save it with save_embedding_layers=True"
            )
        return None, None
    rows = rows.clone()
    for places, values in trained:
        if max(places) >= len(rows):
            raise AdapterError(f"the adapter has trained rows of tokens behind the {len(rows)} that it adds")
        rows[places] = values
    plain = rows
    for change in changes:
        if change.shape != rows.shape:
            raise AdapterError(f"the adapter adds {len(rows)} tokens to the {what}, and changes {len(change)} of them")
        rows = rows + change
    return rows, plain


def _checked(module: ModuleTensors, rows: Tensor, matrix: TokenMatrix) -> Tensor:
    if rows.shape[1:] != (matrix.width,):
        raise AdapterError(
            f"the rows of added tokens of {module.name} have the width {tuple(rows.shape[1:])}; "
            f"this model has {matrix.width}"
        )
    return rows
