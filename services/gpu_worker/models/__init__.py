"""The supported model families, one file for each family. They are built from the parts in `layers/`.

`engine` calls `registry.find_family`, then the family's `build(config, table)`. The model declares its weights in the
`WeightTable`, and `engine` loads the checkpoint into them.

- `interface.Model` and `interface.ModelShape`: the only view that the rest of the worker has of a family.
- `decoder.Decoder`: makes the layers, by a function that a family passes, and runs them with its other parts:
  embeddings, norm, head, rotations. Behind the attention of the last layer it keeps only the rows that need logits.
- `stage_model`: a decoder with the layers of one pipeline stage. No family knows of stages.
- `layer_types`: the kind of each layer, where layers differ in their windows or rotations.
- `llama_style`: dense families with Llama's names of weights. Its `llama.build_llama` builds a decoder of them, and
  `LlamaVariant` says how a family differs. `gemma`, `layer_norm`: other dense families. `moe`: mixtures of experts.
- `encoders`: models whose tokens attend to both sides. `output_layers`: what a model that pools has in place of a head.
- `transformers_model`: decoder classes of transformers. `transformers_layers`: their modules that our kernels compute,
  and the trial that a class has to pass.

Families import `layers/`, `loading/` and `step`, and nothing from `execution/`, `kv/` or `sampling/`.

Where a vision encoder's output goes: it is an input vector in place of a token's id. `step.InputVectors` has those of a
step and their rows, and `Decoder` puts them where the embedding's are; nothing behind it knows of images.
1. The encoder is a model of `encoders` (with attention of packed sequences) that the family builds beside `Decoder`.
2. Its placeholders are ids of the prompt, and the digest of the image is an extra key of the blocks that have them.
3. The worker keeps the vectors until the chunks of the prompt with their positions are computed: as
   `prompt_adapters.PromptVectors` keeps those of virtual tokens, which take the same way.

How to add a model family:
1. Write `models/<kind>/<family>.py`: `build(config, table) -> Model`, and a struct of the config.json fields it reads.
2. If checkpoints name their weights as Llama's do, call `llama.build_llama` with a `LlamaVariant` (phi3.py, gemma2.py).
3. Otherwise make the parts in `layers/` with the family's own names and pass them to `Decoder` (gpt2.py, falcon.py).
   A family that needs something new passes another layer or norm: shared code has no `if` for a family.
4. Add one line to the table in `shared/architectures.py`; `blockyard models --write` updates FAMILIES.md.
5. Add a tiny checkpoint to tests/support/models/tiny_dense.py or tiny_models.py: `test_parity` compares it with
   transformers.
"""
