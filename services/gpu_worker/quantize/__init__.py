"""Writes quantized checkpoints of `blockyard quantize`: each weight is rounded to nearest, without any text.

`python -m blockyard.services.gpu_worker.quantize` runs `__main__`, which prints a table of the layers. `rounding` says
how a matrix is rounded and stored, in the layouts of compressed-tensors; `stacked_experts` cuts stacks into matrices;
`folder` reads and writes the files, one tensor at a time. The worker does not import this folder. It imports
`quantization/`.
"""
