"""Matrices of which a file does not say whether it quantizes them: routers, embeddings, and what is no linear layer.

The tensors that the checkpoint has decide. Either way the matrix is needed as numbers.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from blockyard.services.gpu_worker.loading.weights import FLOATS
from blockyard.services.gpu_worker.quantization.kept import dequantized
from blockyard.services.gpu_worker.quantization.kept.dequantized import Dequantized
from blockyard.services.gpu_worker.quantization.scheme import WEIGHT, Matrix, StoredMatrix
from blockyard.shared.errors import LoadError


def quantized_or_not(
    matrix: Matrix, stored: StoredMatrix, codes: str = WEIGHT, dtype: torch.dtype = torch.float32
) -> StoredMatrix:
    """The matrix as numbers, from the tensors of `stored` or from its weight alone.

    codes: the key of the quantized weight. A weight that is not quantized is called "weight" in any case. dtype: of the
    numbers in memory.
    """
    own, shape = stored.tensors[codes], matrix.stored_shape
    found = {key: replace(one, optional=True) for key, one in stored.tensors.items() if key != codes}
    found[codes] = replace(
        own,
        dtypes=own.dtypes | FLOATS,
        other_shapes=(*own.other_shapes, shape),
        other_names=(*own.other_names, *({matrix.tensor(WEIGHT)} - {own.name})),
    )
    needed = {key: one.name for key, one in stored.tensors.items() if key != codes and not one.optional}

    def to_numbers(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        weight = tensors[codes]
        missing = [name for key, name in needed.items() if key not in tensors]
        if len(missing) == len(needed) and tuple(weight.shape) == shape and weight.dtype in FLOATS:
            return {dequantized.WEIGHT: weight.mT if matrix.transposed else weight}
        if missing:
            raise LoadError(f"the checkpoint lacks {missing[0]}")
        return {dequantized.WEIGHT: stored.form.dequantize(stored.to_kept(tensors), matrix.inputs, torch.float32)}

    return replace(stored, form=Dequantized(dtype), tensors=found, to_kept=to_numbers, is_certain=False, note="")
