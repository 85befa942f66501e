"""The model architectures that workers can run, by their names in config.json.

The launcher checks them before it starts anything; a test holds this list against the worker's own.
"""

SUPPORTED = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "OPTForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)
