"""Moves tensors from the GPU to host memory and back. They keep their storage objects, so references stay valid."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor


class OffloadedWeights:
    """The memory of all `tensors` on a GPU, moved to host memory. `restore` gives them new addresses."""

    @torch.inference_mode()
    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._host: list[tuple[torch.UntypedStorage, Tensor]] = []
        for storage in {s.data_ptr(): s for s in storages(tensors)}.values():
            bytes_ = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            self._host.append((storage, bytes_.cpu()))
            del bytes_
            storage.resize_(0)

    @torch.inference_mode()
    def restore(self) -> None:
        for storage, kept in self._host:
            storage.resize_(kept.numel())
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).copy_(kept)
        self._host.clear()


def storages(tensors: Iterable[Tensor]) -> Iterator[torch.UntypedStorage]:
    """The storages of the tensors on a GPU. Some may come several times."""
    for tensor in tensors:
        if not tensor.is_cpu and tensor.untyped_storage().nbytes():
            yield tensor.untyped_storage()
