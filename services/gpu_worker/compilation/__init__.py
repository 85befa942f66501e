"""Compiles Triton kernels in parallel processes at the first start of a worker on a machine.

- `kernel_compiler.KernelCompiler`: while it records, a launched kernel is compiled in another process and does not run.
- `record_kernels.compile_kernels`: launches every kernel that a worker needs, while the compiler records.
- `kernel_claims.KernelClaims`: divides the kernels among the ranks of a host, so that each is compiled once.
- `compile_processes.CompileProcesses`: owns the processes. `compile_process` is their main module.

`__main__` starts the processes, and `startup.cuda` calls `record_kernels`. This folder imports `execution/`, `warm_up`,
`linear_tuning/` and what these import. Only `compile_processes` may be imported without Triton.
"""
