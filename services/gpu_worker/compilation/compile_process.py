"""`python -m blockyard.services.gpu_worker.compilation.compile_process`: compiles Triton kernels, one after the other.

Reads one line for each kernel, Triton's `specialization_data` and the target, and answers with one line: empty, or the
error. Triton's cache on disk has the binary then. It uses no GPU. `compile_processes` starts it.
"""

import json
import os
import sys
from typing import Any

import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.compiler import ASTSource, compile
from triton.compiler.compiler import make_backend
from triton.errors import TritonError
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import JITFunction

# These import the modules of all kernels of a step, which are looked up by name.
from blockyard.kernels.all_reduce import sum_ranks
from blockyard.kernels.lora import adapt_embeddings, add_adapters, add_to_heads, replace_logits
from blockyard.kernels.quantized import unpack_blocks
from blockyard.services.gpu_worker.execution.cuda import cuda_steps, pooled_attention
from blockyard.services.gpu_worker.layers import triton_ops
from blockyard.services.gpu_worker.layers.moe import exact_product, grouped_experts
from blockyard.services.gpu_worker.linear_tuning import tuner as linear_tuning
from blockyard.shared.process.settings import end

LOADED = (
    *(adapt_embeddings, add_adapters, add_to_heads, replace_logits),
    *(cuda_steps, exact_product, grouped_experts, linear_tuning, pooled_attention),
    *(sum_ranks, triton_ops, unpack_blocks),
)
# Errors of compilers. The worker then compiles the kernel itself and reports the details.
PROBLEMS = (TritonError, RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError, OSError)


NICENESS = 10  # candidates of the tuner are compiled while the worker may serve


def main() -> None:
    os.nice(NICENESS)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # output of compilers must not reach the answers
    for line in sys.stdin:
        error = compile_kernel(line)
        try:
            answers.write(f"{error}\n")
        except BrokenPipeError:  # the worker has ended, and its start has said why
            return


def compile_kernel(line: str) -> str:
    """Returns the error in one line, empty if it is compiled."""
    data = json.loads(line)
    try:
        function, target = find_kernel(data["name"]), GPUTarget(*data["gpu"])
        source_type = GluonASTSource if function.is_gluon() else ASTSource
        source = source_type(function, _signature(data), _constants(data), _attributes(data))
        options = {key: tuple(value) if isinstance(value, list) else value for key, value in data["options"].items()}
        options = make_backend(target).parse_options(options).__dict__
        kernel = compile(source, target=target, options=options)
        if hasattr(nvidia, "make_launcher"):  # up to Triton 3.6 a C compiler makes a function for each signature
            nvidia.CudaLauncher(kernel.src, kernel.metadata)
    except PROBLEMS as e:
        return f"{data['name']}: {type(e).__name__}: {' '.join(str(e).split())[:300]}"
    return ""


def find_kernel(name: str) -> JITFunction[Any]:
    """Finds a kernel by its full name. Raises LookupError."""
    module, _, function = name.rpartition(".")
    if module not in sys.modules:
        raise LookupError(f"no module {module} is loaded")
    found = getattr(sys.modules[module], function, None)
    if not isinstance(found, JITFunction):
        raise LookupError(f"{name} is no kernel")
    return found


def _signature(data: dict[str, Any]) -> dict[str, Any]:
    return {key: _tuples(value) for key, value in data["signature"].items()}


def _constants(data: dict[str, Any]) -> dict[tuple[int, ...], Any]:
    """Decodes constants: JSON has lists for tuples, and names for Triton's types."""

    def constant(value: Any) -> Any:
        if isinstance(value, dict) and "constexpr" in value:
            return tl.constexpr(value["constexpr"])
        return tl.dtype(value) if tl.dtype.is_dtype(value) else value

    keys = (tuple(key) for key in data["constant_keys"])
    return dict(zip(keys, map(constant, data["constant_vals"]), strict=True))


def _attributes(data: dict[str, Any]) -> dict[tuple[int, ...], Any]:
    return dict(zip((tuple(key) for key in data["attrs_keys"]), data["attrs_vals"], strict=True))


def _tuples(value: Any) -> Any:
    return tuple(_tuples(one) for one in value) if isinstance(value, list) else value


if __name__ == "__main__":
    main()
    end(0)
