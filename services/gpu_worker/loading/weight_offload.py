"""Moves weights from the GPU to host memory and back. Tensors keep their storage objects, so references stay valid."""

from collections.abc import Iterator

import torch
from torch import Tensor

_OURS = "blockyard."


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
    seen: set[int] = set()
    rest = [owner]
    while rest:
        thing = rest.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, Tensor):
            if thing.device.type != "cpu" and thing.untyped_storage().nbytes():
                yield thing.untyped_storage()
        elif isinstance(thing, dict):
            rest.extend(thing.values())
        elif isinstance(thing, list | tuple | set | frozenset):
            rest.extend(thing)
        elif type(thing).__module__.startswith(_OURS):
            rest.extend(_fields(thing))


def _fields(thing: object) -> Iterator[object]:
    yield from getattr(thing, "__dict__", {}).values()
    for kind in type(thing).__mro__:
        for name in getattr(kind, "__slots__", ()):
            if hasattr(thing, name):
                yield getattr(thing, name)


def free_cache(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()
