"""The fields of quantization_config, one struct for each format: what the launcher checks before it starts a process,
and what `gpu_worker.quantization.formats` reads. Imports no torch.

`reading.read` converts quantization_config to a struct, whose `__post_init__` refuses values. As in the packages that
write these files, words count without regard to case, numbers and flags may be text, a null is the default, and fields
that no struct has are ignored. `integers` has formats of integers and of tables, `floats` those of 8- and 4-bit floats,
`groups` those with settings of groups of matrices; `table.check` picks a struct by the name of the method. `files`
finds what stands beside config.json.
"""
