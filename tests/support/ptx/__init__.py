"""Runs compiled PTX on the CPU: for kernels in Gluon, which has no interpreter, and for what Triton's interpreter does
not show, as bfloat16 and the alignment of wide loads.

- `memory`: global memory, whose accesses are checked, and shared memory.
- `instructions`: what instructions compute, for all threads of a program at once.
- `program`: one program of a launch, with its registers and branches.
- `launches`: compiles kernels as they are launched, for an H100, and runs what was compiled.
- `experts_mma_cases`: products of experts, for these launches and for a GPU.
"""
