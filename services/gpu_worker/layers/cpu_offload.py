"""--cpu-offload-gb: part of the layers' weights stay in pinned host memory, spread over the model.

Experts go first: kernels read the weights of chosen experts where they are, over the host link, so that a step of few
rows reads few of them. Matrices that every row needs are copied to the GPU in every step: two buffers on the GPU
alternate, and while a product reads one, the next matrix is copied to the other on another stream. A matrix has the
same address in every step, so that CUDA graphs work.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from blockyard.services.gpu_worker.host_link import LinkEvent
from blockyard.services.gpu_worker.layers.linear import Linear, Product
from blockyard.services.gpu_worker.loading.weights import ALL_ON_DEVICE, HostShare, WeightTable
from blockyard.services.gpu_worker.memory import GIB
from blockyard.shared.errors import LoadError

Declare = Callable[[WeightTable], object]  # places a model's weights in a table

BUFFERS = 2
ALIGNMENT = 256  # bytes, of each tensor in a buffer


def share_of_layers(declare: Declare, dtype: torch.dtype, gib: float, free_bytes: int) -> HostShare:
    """The parts of the layers' weights that make `gib` together, experts first. Raises LoadError if host memory does
    not suffice."""
    if not gib:
        return ALL_ON_DEVICE
    table = WeightTable(dtype, torch.device("meta"))
    declare(table)
    asked = min(int(gib * GIB), table.matrix_bytes + table.expert_bytes)
    experts = min(asked, table.expert_bytes)
    share = HostShare(_part(asked - experts, table.matrix_bytes), _part(experts, table.expert_bytes))
    trial = WeightTable(dtype, torch.device("meta"), share)
    declare(trial)
    if not trial.matrices_on_host and not trial.experts_on_host:
        all_gib = (table.matrix_bytes + table.expert_bytes) / GIB
        raise LoadError(f"--cpu-offload-gb {gib:g}: no matrix is so small; layers have {all_gib:.4g}")
    if asked > free_bytes:
        raise LoadError(f"--cpu-offload-gb {gib:g}: {free_bytes / GIB:.2f} GiB of host memory are free")
    return share


def _part(of: int, whole: int) -> float:
    return of / whole if whole else 0.0


def describe_experts(table: WeightTable) -> list[str]:
    """Returns a line about the weights of experts in host memory, if there are any."""
    size = sum(one.nbytes for one in table.experts_on_host)
    if not size:
        return []
    return [f"experts in host memory: {size / GIB:.2f} GiB, of which a step reads those that its tokens choose"]


@dataclass(slots=True)
class OffloadedMatrix:
    """The tensors of one matrix: their host memory, and their buffers on the GPU, which are of the same shapes."""

    linear: Linear
    tensors: list[tuple[Tensor, Tensor]]  # host and buffer of each
    copied: LinkEvent

    @property
    def size_bytes(self) -> int:
        return sum(host.nbytes for host, _ in self.tensors)

    def copy(self) -> None:
        for host, buffer in self.tensors:
            buffer.copy_(host, non_blocking=True)


class HostWeights:
    """Owns the matrices in host memory, in the order in which a step uses them."""

    def __init__(self, linears: Sequence[Linear], table: WeightTable) -> None:
        """Call it after loading, before other code uses `linears`. At least one matrix has to be in host memory."""
        host_ids = {id(weight) for weight in table.matrices_on_host}
        tensors = [(linear, linear.method.tensors()) for linear in linears]
        found = [(linear, own) for linear, own in tensors if any(id(one) in host_ids for one in own.values())]
        most = max(sum(_aligned(one.nbytes) for one in own.values()) for _, own in found)
        memory = [torch.empty(most, dtype=torch.uint8, device=table.device) for _ in range(BUFFERS)]
        self._stream = table.link.stream()
        self._first, self._matrices = linears[0], list[OffloadedMatrix]()
        for i, (linear, own) in enumerate(found):
            matrix, start = OffloadedMatrix(linear, [], self._stream.event()), 0
            for name, host in own.items():
                buffer = memory[i % BUFFERS][start : start + host.nbytes].view(host.dtype).view(host.shape)
                matrix.tensors.append((host, buffer))
                linear.method.replace(name, buffer)
                start += _aligned(host.nbytes)
            self._matrices.append(matrix)

    def __str__(self) -> str:
        sizes = [matrix.size_bytes for matrix in self._matrices]
        return (
            f"weights in host memory: {sum(sizes) / GIB:.2f} GiB, copied up in every step through {BUFFERS} buffers of "
            f"{max(sizes) / (1 << 20):.1f} MiB"
        )

    def install(self) -> None:
        """Call it after the kernels of the products are picked."""
        for i, matrix in enumerate(self._matrices):
            matrix.linear.wrap(self._wait_and_prefetch(i))
        self._first.wrap(self._prefetch_first)

    def _prefetch_first(self, product: Product) -> Product:
        def run(x: Tensor) -> Tensor:
            for i in range(min(BUFFERS, len(self._matrices))):
                self._copy(i)
            return product(x)

        return run

    def _wait_and_prefetch(self, i: int) -> Callable[[Product], Product]:
        matrix = self._matrices[i]

        def around(product: Product) -> Product:
            def run(x: Tensor) -> Tensor:
                matrix.copied.hold_steps()
                result = product(x)
                if i + BUFFERS < len(self._matrices):
                    self._copy(i + BUFFERS)
                return result

            return run

        return around

    def _copy(self, i: int) -> None:
        """Copies a matrix to its buffer after the kernels launched so far, which include the buffer's last reader."""
        matrix = self._matrices[i]
        self._stream.follow_steps()
        with self._stream.use():
            matrix.copy()
            matrix.copied.record()


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT
