"""The formats of quantized checkpoints, one file for each `quant_method`. How to add one:

1. A file here with `build`, which makes a `scheme.Scheme` of quantization_config. That reads the settings
   (`reading.read`) and says of a matrix, by its name in the checkpoint (`names.NamePatterns`), whether and how it is
   quantized. `stored` returns the tensors that the checkpoint has (`Matrix.stored`), the kept form (`kept/`, or
   `Dequantized`), and a function that makes the form's tensors of them, with rows as stored and inputs side by side.
   `layouts` has what formats share. Parts, shares of ranks, experts, biases, and matrices that are needed as numbers
   are `QuantizedFormat`'s.
2. A line in shared/quantization/table.py: the name, and the struct of the fields that the file reads. The launcher
   refuses by the struct before it starts a process, and may not import this package: a struct that is there for no
   other format is written beside the table, in the file of its kind.
3. A test in tests/services/gpu_worker/quantization/formats, which writes a tiny checkpoint of the public layout and
   compares it with the numbers that it stands for (tests/support/models/quantized_checkpoint.py). What it has in
   `SAMPLES` is also started by every name that reads it (test_every_name.py).

`blockyard flags` then writes the name into FLAGS.md and README.md.
"""
