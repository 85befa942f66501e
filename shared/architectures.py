"""The model architectures that workers can run, by their names in config.json.

The launcher checks them before it starts a process; a test compares this list with the worker's.
"""

SUPPORTED = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "OPTForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)
