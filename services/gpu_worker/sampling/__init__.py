"""From logits to token ids.

`sampler.Sampler` is the host's pipeline: `edits` and `penalties` change logits, `topk_topp_sampler` samples, `logprobs`
and `prompt_logprobs` report log-probabilities; `metadata` holds the parameters of all slots. `device_edits` prepares
the same for the kernels of steps that run ahead of the host.
"""
