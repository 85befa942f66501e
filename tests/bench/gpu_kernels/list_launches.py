"""Lists the kernels of a decode step of one row in the order of their launch, without a GPU.

`list_launches.py [CASE ...] [--rows N]`. The worker's own code runs for an H200: its tensors have no memory (torch's
meta device), and kernels are listed in place of their launch. Linear layers have the kernels that fuse most, experts
the first candidate. Prints the kernels of a layer, from its attention on, and a table of all cases.
"""

import argparse
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

HAS_GPU = mock.patch.object(torch.cuda, "is_available", lambda: True)  # modules import their kernels
with HAS_GPU:
    from blockyard.services.bench.suite import shapes
    from blockyard.services.gpu_worker.execution.cuda.decode_graphs import DecodeSettings, DecodeSize, DecodeSteps
    from blockyard.services.gpu_worker.execution.cuda.device_ops import make_device_ops
    from blockyard.services.gpu_worker.kv.pool import KVPool
    from blockyard.services.gpu_worker.linear_tuning.kernel_configs import CUBLAS, TunedConfig
    from blockyard.services.gpu_worker.linear_tuning.tuner import Tuner
    from blockyard.services.gpu_worker.loading.linear_spec import Split
    from blockyard.services.gpu_worker.loading.weights import WeightTable
    from blockyard.services.gpu_worker.models.interface import Model
    from blockyard.services.gpu_worker.models.registry import find_family
    from blockyard.services.gpu_worker.parallel.rank_group import RankGroup
    from blockyard.services.gpu_worker.parallel.shares import Shard
    from blockyard.services.kv_transfer import arena

LAYERS = 4  # of each model: two more than the first and the last one, of which a table is made
MODEL_LEN = 2048
DEVICE, DTYPE = torch.device("cuda:0"), torch.bfloat16
H200 = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, multi_processor_count=132)
CASES = {  # name -> model of the suite, ranks, --enable-expert-parallel
    "bf16": ("qwen3-30b-a3b", 1, False),
    "fp8": ("qwen3-30b-a3b-fp8", 1, False),
    "w4": ("qwen3-30b-a3b-w4", 1, False),
    "tp2": ("qwen3-30b-a3b", 2, False),
    "ep2": ("qwen3-30b-a3b", 2, True),
    "gpt-oss": ("gpt-oss-20b", 1, False),
    "gpt-oss-mxfp4": ("gpt-oss-20b-mxfp4", 1, False),
}
# operations that launch nothing
FREE = ("empty", "view", "as_strided", "select", "slice", "expand", "permute", "transpose", "unsqueeze", "squeeze",
        "split", "flatten", "detach", "alias", "unbind", "unsafe_view", "lift_fresh")  # fmt: skip
ATTENTION = "fused_decode"


_TENSOR: Any = Tensor  # its types do not know that properties are descriptors


class NoGPU:
    """Triton's driver of a GPU that is not there."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Launches(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Names of kernels, in order."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.partition(".")[0]
        if not name.startswith(FREE):
            self.names.append(f"torch {name}")
        return func(*args, **(kwargs or {}))


class WithoutMemory(TorchFunctionMode):
    """Tensors of the GPU are on the meta device, and say that they are on the GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _TENSOR.device.__get__:
            found = func(*args)
            return DEVICE if found.type == "meta" else found
        if func in (_TENSOR.is_cuda.__get__, _TENSOR.is_meta.__get__):
            is_meta = _TENSOR.is_meta.__get__(*args)
            return is_meta == (func == _TENSOR.is_cuda.__get__)
        args = [_memory_of(one) for one in args]
        return func(*args, **{name: _memory_of(one) for name, one in (kwargs or {}).items()})


def _memory_of(argument: Any) -> Any:
    return torch.device("meta") if argument == DEVICE and isinstance(argument, torch.device) else argument


class Transport:
    """In place of NCCL: each collective is one kernel. Nothing is sent."""

    def __init__(self, names: list[str]) -> None:
        self._names = names

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self._names.append(f"nccl {name}")


class PeerKernels:
    """Implements `SumKernels`: each sum is one kernel."""

    def __init__(self, names: list[str]) -> None:
        self._names = names

    def sum(self, part: Tensor) -> Tensor:
        self._names.append("sum_ranks")
        return torch.empty_like(part)

    def sum_add_rms_norm(
        self, part: Tensor, residual: Tensor, weight: Tensor, eps: float, total: Tensor | None = None
    ) -> Tensor:
        self._names.append("sum_ranks with norm")
        return torch.empty_like(residual)

    def check(self) -> None:
        """Nothing waits."""


def _install_kernels(model: Model, rows: int) -> None:
    """Those that fuse most, which the tuner chooses for few rows."""
    linears = model.linears()
    if model.table.shard.size > 1:
        whole = [one for one in linears if one.spec.split is Split.NONE]
        Tuner(whole, device=DEVICE, dtype=DTYPE).install_alike([rows])
        linears = [one for one in linears if one.spec.split is not Split.NONE]
    tuner = Tuner(linears, model.experts(), device=DEVICE, dtype=DTYPE)
    configs = [
        next((one for one in tuner.candidates(layer, rows) if one.kernel == "skinny"), CUBLAS) for layer in tuner.layers
    ]
    tuner.install_those_of(msgspec.json.encode([TunedConfig(tuner.layers, "bfloat16", rows, configs)]))


def launches_of(model_name: str, ranks: int, spreads_experts: bool, rows: int) -> list[str]:
    """Kernels of a forward pass."""
    settings = {**shapes.read(model_name), "num_hidden_layers": LAYERS}
    if "layer_types" in settings:
        settings["layer_types"] = settings["layer_types"][:LAYERS]
    launches = Launches()
    with _absent_gpu(launches):
        table = WeightTable(DTYPE, DEVICE, shard=Shard(0, ranks))
        table.spreads_experts = spreads_experts
        if ranks > 1:
            table.ranks = RankGroup(
                table.shard, Transport(launches.names), DEVICE, sums_in_order=False, host_waits=False
            )
            table.ranks.kernels = PeerKernels(launches.names)
        model = find_family(settings)(settings, table)
        model.prepare(MODEL_LEN)
        _install_kernels(model, rows)
        pool = KVPool(model.shape, 16, 16, DTYPE, DEVICE)
        steps = DecodeSteps(
            model,
            pool,
            DecodeSettings(capacity=max(rows, 8), max_model_len=MODEL_LEN, eos_token_ids=[0]),
            make_device_ops(pool, fused_steps=True),
        )
        with launches:
            steps.forward(DecodeSize(rows, short_context=True))
    return launches.names


@contextmanager
def _absent_gpu(launches: Launches) -> Iterator[None]:
    """Kernels are listed in place of their launch."""

    def launch(function: Any, *args: Any, **options: Any) -> None:
        fused = [f" {name.lower()}" for name in ("NORM", "ADD") if options.get(name)]
        launches.names.append("".join([function.__name__.strip("_").removesuffix("_kernel"), *fused]))

    driver.set_active(NoGPU())
    with (
        HAS_GPU,
        mock.patch.object(arena, "own_pool", nullcontext),
        mock.patch.object(torch.cuda, "get_device_properties", lambda device: H200),
        mock.patch.object(torch.cuda, "get_device_capability", lambda device: (H200.major, H200.minor)),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: False),
        mock.patch.object(JITFunction, "run", launch),
        WithoutMemory(),
        torch.inference_mode(),
    ):
        yield


def a_layer(names: list[str]) -> list[str]:
    """Those from the attention of a layer up to that of the next."""
    attentions = [i for i, name in enumerate(names) if name.startswith(ATTENTION)]
    return names[attentions[1] : attentions[2]]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", nargs="*", default=list(CASES), metavar="CASE", help=f"of {', '.join(CASES)}")
    parser.add_argument("--rows", type=int, default=1)
    args = parser.parse_args()
    counts = {}
    for case in args.cases:
        names = launches_of(*CASES[case], args.rows)
        layer = a_layer(names)
        counts[case] = Counter(layer)
        print(f"{case}: {len(layer)} a layer, {len(names)} in {LAYERS} layers with embedding and head")
        print("   ", ", ".join(layer))
    print("", "kernels a layer", *counts, "", sep=" | ")
    print("|---" * (len(counts) + 1) + "|")
    for name in dict.fromkeys(name for some in counts.values() for name in some):
        print("", name, *(some[name] or "" for some in counts.values()), "", sep=" | ")


if __name__ == "__main__":
    main()
