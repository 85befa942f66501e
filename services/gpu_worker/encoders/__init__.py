"""Runs models without KV: packed sequences, whole, without blocks, slots on the device, sampler or decode graphs.

- `packed_steps.PackedSteps`: one forward pass over packed texts, and the pooling behind it.
- `read_packed`: the columns of a plan to arrays, and results to the block of bytes of their frame.
- `encoder_runner.EncoderRunner`: plans to steps, and their results.
- `encoder_ranks`: the leader of several ranks announces steps, and followers compute their share of them.
- `encoder_engine.start_encoder`: loads the model; `engine.start` calls it.

The models are in `models/encoders`, their attention is `attention/packed_attention`, CUDA graphs of small steps are
`execution/packed_graphs`, the threads of a step on the CPU `execution/text_threads`.
"""
