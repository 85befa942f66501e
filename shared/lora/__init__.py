"""Adapters for more than one service: PEFT's folders. Imports no torch.

`adapter_config` reads the config of a LoRA adapter, `prompt_config` that of a prompt adapter. `adapter_folder` finds
and reads a folder's files for workers; the launcher calls its `check_folder` for adapters that a server starts with.
"""
