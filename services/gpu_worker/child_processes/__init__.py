"""What a worker's child processes have in common: how they are started, and the frames between them and the worker.

`structured_output/` has matchers, `lora/` a reader of adapters. A child is a new program, never a fork: a fork of a
process that uses CUDA does not work. It ends with the worker, or when its socket is closed.
"""
