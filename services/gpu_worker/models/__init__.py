"""One file a model family, built of the parts in `layers/`.

`engine` calls `registry.find_family`, then `build(config, table)`, and loads the weights into the places that the model
has made in the `WeightTable`. Families import `layers/` and `hf_config`; the rest of the worker sees a family only
through `interface.Model` and `interface.ModelShape`. `decoder.Decoder` is the pre-norm decoder that most families use.

How to add a model family:
1. Write `models/<family>.py`: `build(config, table) -> Model`, and a msgspec struct of the config.json fields it reads.
2. A family that differs from Llama by a part calls `llama.build_llama` with another `make_attention` or other windows.
3. Any other family makes its own `DecoderLayer` (or a class with the same methods) of parts from `layers/`.
4. Add one line to the table in `shared/architectures.py`.
5. Add a tiny checkpoint to tests/services/gpu_worker/tiny_models.py: `test_parity` compares it with transformers.
"""
