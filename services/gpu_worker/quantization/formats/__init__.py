"""The formats of quantized checkpoints, one file for each `quant_method`. How to add one:

1. Add a struct with the fields of quantization_config to shared/quantization_settings, which refuses values, and a line
   to its table. Write a class with the methods of `scheme.Scheme`: it reads the struct (`reading.read`) and says of a
   matrix, by its name in the checkpoint (`names.NamePatterns`), whether and how it is quantized.
2. `stored` returns the tensors that the checkpoint has (`Matrix.stored`), the kept form (`kept/`, or `Dequantized`),
   and a function that makes the form's tensors of them, with rows as stored and inputs side by side.
   `layouts` has what formats share.
3. Parts, shares of ranks, experts, biases, and matrices that are needed as numbers are `QuantizedFormat`'s.
4. Add the class to `FORMATS` in registry.py, and give its name the module's in shared/quantization.py.
5. A file in tests/support/formats writes a tiny checkpoint of the public layout, its test compares it with the numbers
   that it stands for (tests/support/models/quantized_checkpoint.py), and a line in all_formats.py there lets it be
   started by its name.
"""
