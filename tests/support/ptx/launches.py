"""Compiles kernels for an H100 as they are launched on CPU tensors, and runs what was compiled there."""

import re
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import triton
from triton.runtime.jit import JITFunction

from ptx.memory import Memory
from ptx.program import Line, Program

STATEMENT = re.compile(r"^(?:@(\S+) )?(\S+) ?(.*)$")  # predicate, instruction, operands
LABEL = re.compile(r"^(\$\w+):")


def _statements(ptx: str) -> Iterator[str]:
    body = re.sub(r"//[^\n]*|\.loc[^\n]*", "", ptx[ptx.index(".entry") :])
    body = body[body.index("{") + 1 : body.rindex("}")]
    body = re.sub(r"(\$\w+):", r";\1:;", body)
    for piece in body.split(";"):
        one = " ".join(piece.split())
        while one[:1] in ("{", "}") and not one.startswith("{%"):
            one = one[1:].strip()
        if one and not one.startswith("."):
            yield one


def _arguments(text: str) -> list[str]:
    return [one.strip() for one in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*", text)]


def _word(number: float) -> int:
    """A number as it is passed."""
    return int.from_bytes(struct.pack("<f", number), "little") if isinstance(number, float) else number


def run_ptx(ptx: str, values: Sequence[torch.Tensor | float], grid: tuple[int, ...], threads: int, shared: int) -> None:
    """Runs all programs of a launch, one after the other.

    values: the arguments that are no constants, in order. Stores change the tensors, which have to be contiguous.
    """
    tensors = [one for one in values if isinstance(one, torch.Tensor)]
    memory = Memory(tensors)
    bases = iter(memory.bases)
    numbers = [next(bases) if isinstance(one, torch.Tensor) else _word(one) for one in values]
    names = re.findall(r"\.param[^,)]*?(\w+_param_\d+)", ptx[ptx.index(".entry") : ptx.index("{", ptx.index(".entry"))])
    params = dict(zip(names, numbers, strict=False))
    lines: list[Line] = []
    labels: dict[str, int] = {}
    for one in _statements(ptx):
        if label := LABEL.match(one):
            labels[label[1]] = len(lines)
        else:
            guard, op, rest = STATEMENT.findall(one)[0]
            lines.append((guard, op, _arguments(rest)))
    whole = (*grid, 1, 1)[:3]
    for z in range(whole[2]):
        for y in range(whole[1]):
            for x in range(whole[0]):
                Program(lines, labels, params, memory, threads, (x, y, z), whole, shared).run()


def emulate_launches() -> None:
    """From now on launches of this process, which compiles for another device, are run on the CPU."""
    compile_alone = JITFunction.run
    triton.knobs.compilation.store_binary_only = False
    triton.knobs.cache.dir += "-with-ptx"

    def run(function: Any, *args: Any, grid: Any, **options: Any) -> Any:
        kernel = compile_alone(function, *args, grid=grid, **options)
        signature = kernel.src.signature
        given = options | dict(zip(function.arg_names, args, strict=False))
        values = [given[name] for name in function.arg_names if signature[name] != "constexpr"]
        run_ptx(kernel.asm["ptx"], values, grid, 32 * kernel.metadata.num_warps, kernel.metadata.shared)
        return kernel

    JITFunction.run = run
