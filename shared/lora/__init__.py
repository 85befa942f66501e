"""LoRA adapters for more than one service: the config of PEFT's folders. Imports no torch.

`adapter_config.parse_config` is called by the launcher, for adapters that a server starts with, and by workers.
"""
