"""From hidden states to vectors, scores and classes.

- `chunks.PooledChunk`: the rows of a step, of sequences that pool. A sequence has one in each step that computes a part
  of it.
- `poolers.Pooler`: reduces the rows of a sequence over all its steps, on the device and in float32. `make_poolers`
  makes one for each mode of `PoolingChoice`, and `Pooler.rows` says which rows a step has to keep.
- `heads`: what is behind. `VectorHead`: dense layers, fewer dimensions, normalization. `ClassHead`: the model's
  classifier and the function of its logits, once.
- `selection.choose_output`: which of these a model has.
- `output.PoolingOutput`: both ends together: a step's rows -> the results of the sequences that are complete.

How to add a pooling or a head: a `Pooler` in `poolers` with the rows that it needs (`rows`), its name in
`shared/config/pooling/`, which reads it from requests, flags and folders, and a line in `make_poolers`; a head is a
class beside `VectorHead` and a line in `selection.choose_output`. Its numbers leave as any vector's do; a shape of
answers of its own goes to `services/api_gateway/apis/pooling`.

`execution/` and `encoders/` call this folder. It imports `models/interface` and `shared/config/pooling`, and knows no
model family: which rows a family's classifier reads says `shared/config/pooling/output_kinds`.
"""
