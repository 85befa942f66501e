"""Token embeddings, and the output matrix that may share their weight."""

import torch.nn.functional as F
from torch import Tensor

from blockyard.services.gpu_worker.layers.linear import Linear, LinearLayers, dense_linear

HEAD = "lm_head"


class TokenEmbedding:
    """The embedding table, [vocab_size, width]."""

    def __init__(self, layers: LinearLayers, name: str, vocab_size: int, width: int) -> None:
        self.weight = layers.table.matrix(f"{name}.weight", vocab_size, width)

    def __call__(self, token_ids: Tensor) -> Tensor:
        return F.embedding(token_ids, self.weight)

    def make_head(self, layers: LinearLayers, tied: bool) -> Linear:
        """Makes the output layer (LM head). tied: it uses this weight, and `lm_head` of the checkpoint is ignored."""
        vocab_size, width = self.weight.shape
        if not tied:
            return layers.make({HEAD: vocab_size}, width)
        layers.table.ignore(f"{HEAD}.weight")
        return dense_linear(self.weight)
