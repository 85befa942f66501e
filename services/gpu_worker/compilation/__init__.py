"""Compiles Triton kernels in parallel processes at the first start of a worker on a machine.

`record_kernels` launches every kernel that a worker will need while `kernel_compiler.KernelCompiler` records instead of
running them; `compile_processes.CompileProcesses` owns the processes and `compile_process` is their main module.
`prefill_kernels` compiles prefill attention in threads of the worker.

`__main__` starts the processes and `engine` records. Only `compile_processes` may be imported without Triton.
"""
