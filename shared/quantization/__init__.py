"""What a checkpoint says about quantized weights: the names of methods, and the fields of quantization_config that
count. The launcher refuses by it before it starts a process, and workers read the same. Imports no torch.

- `table`: each name of --quantization with its module in `gpu_worker.quantization.formats` and its struct of settings.
- `reading.read` converts quantization_config to a struct, whose `__post_init__` refuses values. As in the packages that
  write these files, words count without regard to case, numbers and flags may be text, a null is the default, and
  fields that no struct has are ignored.
- `integers` has settings of formats of integers and of tables, `floats` those of 8- and 4-bit floats, `groups` those of
  groups of matrices; `reading` what several have.
- `method` finds the line of a checkpoint, and settles --quantization with it. `files` finds what stands beside
  config.json.
"""
