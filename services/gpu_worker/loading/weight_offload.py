"""Moves weights from the GPU to host memory and back. Tensors keep their storage objects, so references stay valid."""

from collections.abc import Iterator

import torch
from torch import Tensor

from blockyard.services.gpu_worker.loading.object_walk import reachable


class OffloadedWeights:
    """GPU tensors reachable from `owner`, in host memory. `restore` gives them new addresses."""

    @torch.inference_mode()
    def __init__(self, owner: object) -> None:
        self._host: list[tuple[torch.UntypedStorage, Tensor]] = []
        for storage in {s.data_ptr(): s for s in storages(owner)}.values():
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


def storages(owner: object) -> Iterator[torch.UntypedStorage]:
    """Storages of all GPU tensors in an object of this project and in its fields."""
    for thing in reachable(owner):
        if isinstance(thing, Tensor) and thing.device.type != "cpu" and thing.untyped_storage().nbytes():
            yield thing.untyped_storage()


def free_cache(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()
